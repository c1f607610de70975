"""The triton backend with split-KV verify attention, for every algorithm that verifies drafts.

All but TARGET_VERIFY is upstream's triton backend. A verify step runs
``kernels/ops/attention/verify_splitkv_gqa.py``, through the hook that backend has for such kernels,
with the mask upstream calls QLEN_ONLY: the drafts' own ``L x L`` cells of each request and no
column for the prefix. A verify input without a mask is a chain. The kernel reads masks as bits, so
they are packed once a step: in a graph from the buffer that the graph owns, which is filled before
a replay, else from the verify input's own.

The kernel is never bypassed within a batch, since upstream's would misread the mask. What it
cannot take is refused when the backend is built, before the server answers anything.

``--speculative-flashmap-verify-attention`` selects it (``arg_groups/verify_attention_hook.py``).
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Optional

import torch
from sglang.kernels.ops.attention.verify_mask_bits import pack_verify_mask, words_a_row
from sglang.kernels.ops.attention.verify_splitkv_gqa import (
    POOL_DTYPES,
    choose_tiles,
    scratch_bytes,
    shared_bytes,
    verify_attention,
)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
from sglang.srt.speculative.eagle_utils import TreeMaskMode

if TYPE_CHECKING:
    from sglang.srt.layers.attention.triton_backend import ForwardMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput

logger = logging.getLogger(__name__)

FLAG = "--speculative-flashmap-verify-attention"
_MAX_HEAD_DIM = 256


class SplitKVAttnBackend(TritonAttnBackend):
    """See the module's docstring."""

    # Sizes the verify mask's buffer.
    reads_prefix_mask = False

    def __init__(self, model_runner: "ModelRunner", **options: Any) -> None:
        super().__init__(model_runner, **options)
        reason = target_refusal(model_runner)
        if reason is not None:
            raise ValueError(
                f"{FLAG} splitkv cannot verify this target: {reason}; pass {FLAG} backend."
            )
        self.use_verify_splitkv = True
        self.use_verify_shared_kv = False
        self.verify_splitkv_fwd = torch.compiler.disable(verify_step)
        # What callers learn the mask's layout from where no graph has made a buffer.
        self._no_buffer = VerifyMask(
            buffer=torch.empty(0, dtype=torch.uint8, device=self.device),
            mode=TreeMaskMode.QLEN_ONLY,
            max_bs=0,
            is_read=True,
        )
        rows = self.num_head // self.num_kv_head * self.num_draft_tokens
        head_dim = model_runner.model_config.head_dim
        device = torch.device(self.device)
        shared = shared_bytes(device)
        tiles = choose_tiles(rows, head_dim, self.v_head_dim, model_runner.dtype, shared)
        scratch = scratch_bytes(rows, self.v_head_dim, tiles, device)
        logger.info(
            "Drafts are verified by split-KV attention, with %.1f MB of scratch.", scratch / 1e6
        )

    @property
    def verify_mask(self) -> Optional[VerifyMask]:
        return self._no_buffer if self._verify_mask is None else self._verify_mask

    def _update_target_verify_buffers(self, plan, bs, seq_lens, spec_info, req_pool_indices):
        # Capture and idle steps bring a placeholder sized for masks with a prefix.
        if spec_info is not None and spec_info.custom_mask is not None:
            spec_info.custom_mask = spec_info.custom_mask[: self._verify_mask.buffer.numel()]
        return super()._update_target_verify_buffers(
            plan, bs, seq_lens, spec_info, req_pool_indices
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **options: Any):
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **options)
        self._graph_words = None
        if self._verify_mask is not None:
            self._graph_words = self._new_words(max_bs, self.num_draft_tokens).flatten()

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        super().init_forward_metadata(forward_batch)
        metadata = self.forward_metadata
        if forward_batch.forward_mode.is_target_verify() and metadata.custom_mask is not None:
            words = self._new_words(metadata.qo_indptr.shape[0] - 1, metadata.max_extend_len)
            pack_verify_mask(metadata.custom_mask, words)
            metadata.custom_mask = words

    def _build_cuda_graph_forward_metadata(
        self,
        bs: int,
        forward_mode: "ForwardMode",
        spec_info: Optional["SpecInput"],
        swa_out_cache_loc: Optional[torch.Tensor] = None,
    ) -> "ForwardMetadata":
        metadata = super()._build_cuda_graph_forward_metadata(
            bs, forward_mode, spec_info, swa_out_cache_loc
        )
        if metadata.custom_mask is not None:
            shape = bs, metadata.max_extend_len, words_a_row(metadata.max_extend_len)
            metadata.custom_mask = self._graph_words[: math.prod(shape)].view(shape)
        return metadata

    def init_forward_metadata_in_graph(self, forward_batch: "ForwardBatch") -> None:
        words = self.forward_metadata.custom_mask
        if forward_batch.forward_mode.is_target_verify() and words is not None:
            pack_verify_mask(self._verify_mask.buffer, words)

    def _new_words(self, batch: int, length: int) -> torch.Tensor:
        shape = batch, length, words_a_row(length)
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


def verify_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: Optional[torch.Tensor],
    is_causal: bool,
    mask_indptr: Optional[torch.Tensor],
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float,
    *,
    logit_cap: float = 0.0,
    sliding_window_size: int = -1,
    sinks: Optional[torch.Tensor] = None,
    **_unused: Any,
) -> bool:
    """``verify_attention`` with the arguments of upstream's verify kernels; always True: it ran."""
    assert is_causal or custom_mask is not None
    verify_attention(
        q,
        k.view(-1, *key_buffer.shape[1:]),
        v.view(-1, *value_buffer.shape[1:]),
        out,
        key_buffer,
        value_buffer,
        qo_indptr,
        kv_indptr[: qo_indptr.shape[0]],
        kv_indices,
        custom_mask,
        max_len_extend,
        sm_scale,
        k_scale,
        v_scale,
        logit_cap,
        sliding_window_size,
        sinks,
    )
    return True


def target_refusal(model_runner: "ModelRunner") -> Optional[str]:
    """Why split-KV verify cannot serve the loaded target; None if it can."""
    pool = model_runner.token_to_kv_pool
    buffer = pool.get_key_buffer(pool.start_layer)
    if buffer.dim() != 3 or buffer.dtype not in POOL_DTYPES:
        return f"its KV pool is {buffer.dim()}-dimensional {buffer.dtype}"
    if buffer.dtype == torch.float8_e4m3fn and buffer.is_cuda:
        if torch.cuda.get_device_capability(buffer.device) < (8, 9):
            return "this GPU cannot convert its float8_e4m3fn KV pool"
    for module in model_runner.model.modules():
        if hasattr(module, "rel_extent"):
            return "it biases attention by distance"
        if not isinstance(module, RadixAttention):
            continue
        if module.is_cross_attention or module.attn_type != AttentionType.DECODER:
            return "it has attention that is not causal"
        if module.xai_temperature_len > 0:
            return "it scales attention by position"
        if module.logit_capping_method != "tanh":
            return f"it caps logits by {module.logit_capping_method}"
        if max(module.qk_head_dim, module.v_head_dim) > _MAX_HEAD_DIM:
            return f"it has heads wider than {_MAX_HEAD_DIM}"
    return None


def triton_backend_class(model_runner: "ModelRunner") -> type[TritonAttnBackend]:
    """Which class serves ``model_runner`` when the triton backend is asked for."""
    if (
        get_spec().speculative_flashmap_verify_attention != "splitkv"
        or model_runner.is_draft_worker
    ):
        return TritonAttnBackend
    return SplitKVAttnBackend


def reads_drafts_mask(attn_backend: Any) -> bool:
    """Whether ``attn_backend``, or the one in it that verifies, reads masks without a prefix."""
    return resolve_dflash_verify_mask_policy(attn_backend)[0] == SplitKVAttnBackend.__name__
