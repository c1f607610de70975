"""Kernels of the FlashMap drafter.

Each module holds one operation in four faces: ``NAME_torch``, the reference, which also serves CPU
tensors; ``NAME_triton``, the launcher of the Triton kernel; the custom op ``sglang::flashmap_NAME``
around that launcher, whose fake implementation lets ``torch.compile`` and graph capture see through
it; and ``NAME``, the public function, which sends CUDA tensors to the custom op and all others to
the reference. Every kernel has fixed shapes and reads lengths on the device, so all of them can be
captured in a CUDA graph.

Importing this package registers metadata only; import the functions from their modules.
"""

from sglang.kernels.registry import register_kernel
from sglang.kernels.spec import CUDA_ONLY, KernelBackend, KernelSpec

_OPS = (
    ("rope", "rope_table"),
    ("norm", "rms_norm"),
    ("norm", "rms_norm_rope"),
    ("adaln", "adaln"),
    ("block_attention", "block_self_attention"),
    ("cross_attention", "paged_cross_attention"),
    ("context_kv", "write_context_kv"),
    ("draft_rows", "draft_rows"),
    ("filter_logits", "filter_logits"),
    ("fp8_linear", "quantize_rows"),
    ("greedy", "argmax_keys"),
    ("greedy", "accept_chain"),
    ("noise", "uniform_noise"),
    ("noise", "gaussian_noise"),
    ("noise", "gaussian_at"),
    ("noise", "normed_noise"),
    ("residual_linear", "add_linear"),
    ("residual_linear", "normed_linear"),
    ("sampler", "sample_draft"),
    ("sampling_inputs", "sampling_inputs"),
    ("skinny_linear", "skinny_linear"),
    ("slot_choices", "slot_choices"),
    ("slot_draws", "slot_draws"),
    ("stage_inputs", "stage_inputs"),
    ("tree", "plan_tree"),
    ("tree_growth", "grow_tree"),
    ("tree_rejection", "reject_tree"),
    ("tree_walk", "walk_tree"),
    ("full_mask", "write_full_mask"),
    ("tree_suffix", "write_tree_suffix"),
    ("accepted_kv", "move_accepted"),
    ("accepted_rows", "accepted_rows"),
)
for _module, _name in _OPS:
    for _backend, _capabilities in (
        (KernelBackend.TORCH, frozenset()),
        (KernelBackend.TRITON, CUDA_ONLY),
    ):
        register_kernel(
            KernelSpec(
                op=f"speculative.flashmap_{_name}",
                backend=_backend,
                target=f"{__name__}.{_module}:{_name}_{_backend.value}",
                capabilities=_capabilities,
            )
        )
del _module, _name, _backend, _capabilities

__all__ = []
