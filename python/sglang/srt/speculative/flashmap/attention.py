"""Cross-attention of the draft over its paged context.

Hopper runs FlashAttention 3 with the ``req_to_token`` rows as page tables of page size 1, but for
one or two requests; every other CUDA GPU runs our Triton kernel, a CPU its torch reference. The
choice is made from the device, the head dimension and the number of requests, which a captured
graph knows. (Of a draft on an H200, ours took 0.475 ms at one request and context 256 where FA3
took 0.524, and 0.671 and 0.655 at context 8192; at four requests 0.528 and 0.557, 1.048 and 0.926.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.speculative.flashmap.cross_attention import paged_cross_attention
from sglang.kernels.ops.speculative.flashmap.norm import rms_norm_rope

if TYPE_CHECKING:
    from sglang.srt.models.flashmap import DraftContext

_FA3_HEAD_DIMS = (64, 96, 128, 192, 256)
# Of so few requests FA3's kernels of a layer, scheduling and merging included, take longer.
_FA3_MIN_REQUESTS = 3


@dataclass(frozen=True)
class QueryNorm:
    """How queries are normed and rotated before they attend."""

    weight: torch.Tensor
    """``(D,)``."""
    rope: torch.Tensor
    """``(B · Q, D / 2, 2)`` float32, of ``rope_table``."""
    eps: float


class ContextAttention:
    """``(projected query (B, Q, H, D), its norm, one layer's buffers, context) -> (B, Q, H, D)``.

    Never causal. Norm and rotation are part of the kernel.
    """

    def __init__(self, name: str = "triton") -> None:
        self.name = name

    def __call__(
        self,
        query: torch.Tensor,
        norm: QueryNorm,
        key_buffer: torch.Tensor,
        value_buffer: torch.Tensor,
        context: "DraftContext",
    ) -> torch.Tensor:
        return paged_cross_attention(
            query,
            key_buffer,
            value_buffer,
            context.req_to_token,
            context.req_pool_indices,
            context.lens,
            norm_weight=norm.weight,
            rope=norm.rope,
            eps=norm.eps,
        )


class FlashAttention3(ContextAttention):
    """The same through FlashAttention 3 where that is faster (sm_90, 16-bit pools)."""

    def __init__(self) -> None:
        super().__init__("fa3")
        from sglang.kernels.ops.attention.flash_attention_v3 import flash_attn_with_kvcache

        self._attend = flash_attn_with_kvcache
        self._tables: tuple["DraftContext", torch.Tensor] | None = None

    def __call__(self, query, norm, key_buffer, value_buffer, context) -> torch.Tensor:
        if query.shape[0] < _FA3_MIN_REQUESTS:
            return super().__call__(query, norm, key_buffer, value_buffer, context)
        # One gather of the page table serves all layers and jumps of a draft.
        if self._tables is None or self._tables[0] is not context:
            self._tables = (context, context.req_to_token[context.req_pool_indices.long()])
        rotated = rms_norm_rope(query.flatten(0, 1), norm.weight, norm.rope, norm.eps)
        return self._attend(
            q=rotated.view(query.shape),
            k_cache=key_buffer.unsqueeze(1),
            v_cache=value_buffer.unsqueeze(1),
            page_table=self._tables[1],
            cache_seqlens=context.lens,
            causal=False,
        )


def select_context_attention(
    device: torch.device | str, *, head_dim: int, pool_dtype: torch.dtype
) -> ContextAttention:
    """The implementation for this device, head dimension and pool dtype."""
    device = torch.device(device)
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] == 9
        and head_dim in _FA3_HEAD_DIMS
        and pool_dtype in (torch.bfloat16, torch.float16)
    ):
        return FlashAttention3()
    return ContextAttention("triton" if device.type == "cuda" else "torch")
