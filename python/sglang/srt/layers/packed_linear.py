"""Linear layers on a CPU with weights in oneDNN's blocked layout.

A verify forward multiplies each weight with 2 to 17 rows. ``F.linear`` on a row-major weight has
a fast path for one row only: two rows cost up to twice as much, though both read the weight once.
oneDNN's blocked layout reads it at the same speed for any few rows. SmolLM2-135M's matrices, one
thread of an AVX-512 Xeon, ms a pass (row-major → blocked):

    rows      1          2          5          9          17
    float32   38 → 43    45 → 45    80 → 50    110 → 58   109 → 73
    bfloat16  38 → 27    40 → 30    51 → 32    63 → 46    90 → 69

In float32 the blocked product of a row is the same bit by bit whatever rows are beside it (of 2 to
33 rows, as far as tried; a row-major one is not), so a text depends less on how it was batched.

Plain decoding keeps upstream's layout: it is the faster one for its single row in float32, and
weights stay open to online updates. A packed weight is an opaque tensor (``weight.is_mkldnn``): it
replaces the row-major one, so nothing is stored twice, and code that does not know it fails
instead of reading stale values. An embedding table that is also the LM head keeps both layouts.

oneDNN keeps code and buffers for each number of rows a weight was multiplied with, half a megabyte
and more a pair of both, and a server meets any number of rows in its prefills. Its caches are
bounded to ``_CACHED_PRODUCTS`` pairs here; 1024, its default, were 700 MB on a tiny model.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import nn

# Rows the layout is chosen for; those for 8 to 64 are equally fast at 2 to 17, that for 1 is not.
_ROWS_HINT = 16
# A decode step of one batch size takes about 16; one that is not cached costs about a millisecond.
_CACHED_PRODUCTS = 256


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN of this machine multiplies with ``weight``'s dtype in its own layout."""
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.dim() != 2:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight (out, in)`` in oneDNN's layout; itself where ``can_pack`` says no."""
    if not can_pack(weight):
        return weight
    # Read at the first use of either cache, torch's and oneDNN's; there is no other way to say it.
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_CACHED_PRODUCTS))
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x (…, in) @ weightᵀ + bias`` for a weight in either layout."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class PackedLinearMethod(UnquantizedLinearMethod):
    """Upstream's unquantized method with ``layer.weight`` packed."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, layer.weight, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """An LM head's product with ``layer.packed_weight``; lookups read ``layer.weight``."""

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x.to(layer.packed_weight.dtype), layer.packed_weight, bias)


def pack_model(model: nn.Module) -> int:
    """Pack the unquantized linear layers and the LM head of a loaded target; bytes packed."""
    packed = 0
    for module in model.modules():
        if not isinstance(module, LinearBase):
            continue
        if type(module.quant_method) is UnquantizedLinearMethod and can_pack(module.weight):
            module.weight = nn.Parameter(pack(module.weight), requires_grad=False)
            module.quant_method = PackedLinearMethod()
            packed += _bytes(module.weight)
    head = getattr(model, "lm_head", None)
    if _packs_head(model, head):
        head.packed_weight = pack(head.weight)
        if isinstance(head, ParallelLMHead):  # no table that is looked up
            head.weight = nn.Parameter(head.packed_weight, requires_grad=False)
        head.quant_method = PackedHeadMethod()
        packed += _bytes(head.packed_weight)
    return packed


def _packs_head(model: nn.Module, head: nn.Module | None) -> bool:
    """Only where upstream would compute the plain product in the weight's own dtype."""
    logits = getattr(model, "logits_processor", None)
    return (
        isinstance(head, VocabParallelEmbedding)
        and type(head.quant_method) is UnquantizedEmbeddingMethod
        and getattr(head, "bias", None) is None
        and logits is not None
        and not logits.use_fp32_lm_head
        and logits.rl_on_policy_target is None
        and can_pack(head.weight)
    )


def _bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()
