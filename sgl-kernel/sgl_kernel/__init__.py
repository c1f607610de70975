"""The ops that sglang imports from `sgl_kernel` on a CPU, in portable PyTorch.

sglang imports these names at start-up when it finds no accelerator, whether it calls them or not.
Plain serving calls none; speculative decoding calls all but `rotate_input_ids_cpu`, which is for
multi-layer EAGLE. Signatures and in-place results are those of sglang's call sites, which each op
names. Ops write into the tensors they are given, in the dtype those have, and return None.

Two things are absent on purpose. Any other name raises ImportError, which sglang's optional imports
expect. And nothing is registered with `torch.library`: an op `sgl_kernel::convert_weight_packed`
is how sglang recognises compiled AMX kernels (srt/utils/common.py).
"""

from importlib import metadata

__version__ = "0.1.0"

_CUDA_DISTRIBUTIONS = ("sglang-kernel", "sgl-kernel")


def _refuse_beside_cuda_kernels() -> None:
    """Raise ImportError if a compiled wheel that owns the package `sgl_kernel` is installed."""
    for name in _CUDA_DISTRIBUTIONS:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        raise ImportError(
            f"sgl-kernel-portable and {name} both provide the package sgl_kernel: uninstall both, "
            f"then install {name} on a CUDA machine or sgl-kernel-portable on any other."
        )


_refuse_beside_cuda_kernels()

from sgl_kernel.cache_locs import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
)
from sgl_kernel.kv_cache import copy_all_layer_kv_cache_cpu  # noqa: E402
from sgl_kernel.speculative import (  # noqa: E402
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
