"""The fa3 backend for FLASHMAP's trees: upstream's, with the tables of a verify step in one launch.

A tree's verify input carries the ``(W, W)`` masks of its requests and no column for the prefix,
which upstream calls QLEN_ONLY. Before the replay of a graph they become the tables that upstream's
attention reads (``kernels/ops/speculative/flashmap/tree_suffix.py``); neither a mask as wide as the
prefix nor a buffer for it is made. A batch too large for a graph takes upstream's way, for which
its mask is widened here.

Attention itself, and every step but the verification of a tree, is upstream's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.trtllm_mha_page_table import build_trtllm_mha_page_table
from sglang.kernels.ops.speculative.flashmap.tree_suffix import SuffixTables, write_tree_suffix
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.flashmap.verify_input import TreeVerifyInput, widened_mask

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """See the module's docstring."""

    # Sizes the verify mask's buffer.
    reads_prefix_mask = False

    def __init__(self, model_runner: "ModelRunner", **options: Any) -> None:
        super().__init__(model_runner, **options)
        assert not self.has_swa, "arg_groups/flashmap_hook.py refuses windows"
        # Of no size: masks are read where they are.
        empty = torch.empty(0, dtype=torch.bool, device=self.device)
        self._drafts_mask = VerifyMask(buffer=empty, mode=TreeMaskMode.QLEN_ONLY, max_bs=0)

    @property
    def verify_mask(self) -> VerifyMask:
        return self._drafts_mask

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        spec_info = forward_batch.spec_info
        if not isinstance(spec_info, TreeVerifyInput):
            super().init_forward_metadata(forward_batch)
            return
        mask, width = spec_info.custom_mask, spec_info.draft_token_num
        spec_info.custom_mask = widened_mask(
            mask.view(-1, width, width),
            forward_batch.seq_lens,
            tokens_bound=forward_batch.seq_lens_sum,
        )
        super().init_forward_metadata(forward_batch)
        spec_info.custom_mask = mask

    def _apply_cuda_graph_metadata(
        self,
        *,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        spec_info: Any,
        **rest: Any,
    ) -> None:
        if not isinstance(spec_info, TreeVerifyInput):
            super()._apply_cuda_graph_metadata(
                bs=bs,
                req_pool_indices=req_pool_indices,
                seq_lens=seq_lens,
                spec_info=spec_info,
                **rest,
            )
            return
        width = spec_info.draft_token_num
        prefix = self.target_verify_metadata_topk_normal[bs]
        suffix = self.target_verify_metadata_topk_expand[bs]
        write_tree_suffix(
            spec_info.custom_mask.view(-1, width, width),
            spec_info.positions,
            seq_lens[:bs],
            req_pool_indices[:bs],
            self.req_to_token,
            SuffixTables(
                prefix_lens=prefix.cache_seqlens_int32,
                prefix_ends=prefix.cu_seqlens_k,
                slots=suffix.page_table,
                lens=suffix.cache_seqlens_int32,
                ends=suffix.cu_seqlens_k,
            ),
        )
        prefix.max_seq_len_k = self.max_context_len
        build_trtllm_mha_page_table(
            req_to_token=self.req_to_token,
            req_pool_indices=req_pool_indices[:bs],
            cache_seqlens=prefix.cache_seqlens_int32,
            page_table=prefix.page_table,
            page_size=self.page_size,
        )
        self.forward_metadata = prefix
        self.forward_metadata_spec_decode_expand = suffix


def fa3_backend_class(model_runner: "ModelRunner") -> type[FlashAttentionBackend]:
    """Ours for a target whose trees FLASHMAP verifies, upstream's otherwise."""
    spec = get_spec()
    trees = spec.speculative_algorithm == "FLASHMAP" and (spec.speculative_eagle_topk or 1) > 1
    if trees and not model_runner.is_draft_worker:
        return TreeFlashAttentionBackend
    return FlashAttentionBackend
