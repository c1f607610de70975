"""Makes fa3's tables of a tree by upstream's class and by ours, under Triton's interpreter.

A process of its own, because TRITON_INTERPRET has to be set before Triton is first imported:
`python interpreted_tree_suffix.py RESULTS` saves, for each case, whether every table is equal, and
how many launches each class took. fa3 itself is stood in for: tables alone are made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import sgl_kernel  # noqa: E402
import torch  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode,
    _disable_current_modes,
)

# Names that only the CUDA build has, and that tables do not need.
sgl_kernel.merge_state_v2 = None
fa3 = ModuleType("sgl_kernel.flash_attn")
fa3.flash_attn_varlen_func = fa3.flash_attn_with_kvcache = fa3.get_scheduler_metadata = None
sys.modules["sgl_kernel.flash_attn"] = fa3

from sglang.kernels.ops.speculative.flashmap import tree_suffix  # noqa: E402
from sglang.kernels.ops.speculative.flashmap.full_mask import write_full_mask_torch  # noqa: E402
from sglang.kernels.ops.speculative.flashmap.tree import plan_tree  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.attention import flashattention_backend, tree_fa3_backend  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.speculative.eagle_utils import TreeMaskMode  # noqa: E402
from sglang.srt.speculative.flashmap.verify_input import (  # noqa: E402
    TreeVerifyInput,
    backend_mask,
)

WIDTH, CONTEXT, SLOTS = 7, 96, 4096
PREFIXES = [33, 5, 64]
# page size, captured batch size (0: no graph)
CASES = {
    "page1": (1, 3),
    "page1-padded": (1, 5),
    "page16-padded": (16, 4),
    "page1-eager": (1, 0),
    "page16-eager": (16, 0),
}


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operators but views, and kernels of Triton."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Launches.count += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


def one_launch(kernel: Callable[..., None]) -> Callable[..., None]:
    """``kernel`` without what its interpreter does."""

    def call(*args: Any, **kwargs: Any) -> None:
        Launches.count += 1
        with _disable_current_modes():
            kernel(*args, **kwargs)

    return call


def write_tree_suffix(*args: Any) -> None:
    """The Triton kernel, which CPU tensors are not sent to."""
    tree_suffix.write_tree_suffix_triton(*args[:-1], args[-1].tensors())


def model_runner(page_size: int) -> SimpleNamespace:
    # Pages of a request are whole: slot = 16 · page + offset.
    pages = torch.randperm(SLOTS // 16).view(-1, CONTEXT // 16 + 2)[:6]
    table = (pages[:, :, None] * 16 + torch.arange(16)).flatten(1).int()
    return SimpleNamespace(
        device="cpu",
        page_size=page_size,
        is_draft_worker=False,
        sliding_window_size=None,
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        req_to_token_pool=SimpleNamespace(size=len(table), req_to_token=table),
        token_to_kv_pool=SimpleNamespace(),
        kv_index_translator=SimpleNamespace(
            is_translating=False,
            reads_are_translated=False,
            build_page_table=lambda *_, **__: None,
        ),
        model_config=SimpleNamespace(
            attention_arch=AttentionArch.MHA,
            head_dim=8,
            context_len=CONTEXT,
            is_encoder_decoder=False,
            is_local_attention_model=False,
            hf_text_config=SimpleNamespace(num_attention_heads=2),
            get_num_kv_heads=lambda *_: 1,
        ),
    )


def tables(backend: Any, page_size: int, captured: int) -> tuple[list[torch.Tensor], int]:
    """The tables after a verify step of ``PREFIXES``, and the launches that they took."""
    size = len(PREFIXES)
    batch = max(size, captured)
    torch.manual_seed(1)
    tree = plan_tree(
        torch.zeros(size).long(),
        torch.randint(3, (size, 4, 5)),
        WIDTH,
        torch.tensor([False, True, False]),
    )
    seq_lens = torch.ones(batch, dtype=torch.int64)
    seq_lens[:size] = torch.tensor(PREFIXES)
    rows = torch.zeros(batch, dtype=torch.int64)
    rows[:size] = torch.tensor([4, 2, 1])
    if backend.verify_mask is not None and backend.verify_mask.mode == TreeMaskMode.QLEN_ONLY:
        bound = torch.tensor(PREFIXES)
        mask = backend_mask(tree, backend, prefix_lens=seq_lens[:size], lens_bound=bound)
    else:
        mask = torch.zeros(WIDTH * (sum(PREFIXES) + size * WIDTH), dtype=torch.bool)
        write_full_mask_torch(tree.mask, seq_lens[:size], mask)
    spec_info = TreeVerifyInput(
        draft_token=tree.tokens.view(-1),
        positions=(seq_lens[:size, None] + tree.depths).view(-1),
        draft_token_num=WIDTH,
        custom_mask=mask,
    )
    forward_batch = SimpleNamespace(
        batch_size=batch,
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        seq_lens_cpu=None,
        seq_lens_sum=sum(PREFIXES),
        positions=torch.zeros(batch * WIDTH),
        spec_info=spec_info,
        kv_loc_plan=None,
        encoder_lens=None,
        out_cache_loc=None,
    )
    if captured:
        backend.init_cuda_graph_state(batch + 1, (batch + 1) * WIDTH)
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        with Launches():
            backend.init_forward_metadata_out_graph(forward_batch)
    else:
        with Launches():
            backend.init_forward_metadata(forward_batch)
    launches, Launches.count = Launches.count, 0
    assert spec_info.custom_mask is mask
    prefix, suffix = backend.forward_metadata, backend.forward_metadata_spec_decode_expand
    found = [
        getattr(metadata, name)
        for metadata in (prefix, suffix)
        for name in ("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table")
    ]
    return [*found, torch.tensor([prefix.max_seq_len_q, suffix.max_seq_len_q])], launches


def compare(page_size: int, captured: int) -> dict[str, Any]:
    results = []
    for choose in (lambda _: flashattention_backend.FlashAttentionBackend,
                   tree_fa3_backend.fa3_backend_class):  # fmt: skip
        torch.manual_seed(0)
        runner = model_runner(page_size)
        results.append(tables(choose(runner)(runner), page_size, captured))
    (upstream, before), (ours, after) = results
    equal = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(upstream, ours, strict=True)]
    return dict(equal=equal, before=before, after=after)


if __name__ == "__main__":
    fields = dict(
        speculative_algorithm="FLASHMAP",
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=WIDTH,
    )
    page_table = one_launch(flashattention_backend.build_trtllm_mha_page_table)
    stand_ins = (
        mock.patch.object(tree_fa3_backend, "write_tree_suffix", one_launch(write_tree_suffix)),
        mock.patch.object(tree_fa3_backend, "build_trtllm_mha_page_table", page_table),
        mock.patch.object(flashattention_backend, "build_trtllm_mha_page_table", page_table),
        mock.patch.object(flashattention_backend, "get_device_capability", lambda: (9, 0)),
        get_context().override_server_args(**fields),
        get_parallel().override(attn_cp_size=1, attn_dcp_size=1, attn_tp_size=1),
    )
    for stand_in in stand_ins:
        stand_in.__enter__()
    torch.save({name: compare(*case) for name, case in CASES.items()}, sys.argv[1])
