"""``Projection``: one linear layer of the draft, in 16 bits or with e4m3 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from sglang.kernels.ops.speculative.flashmap.fp8_linear import (
    can_quantize,
    fp8_linear,
    quantize_rows,
)
from sglang.kernels.ops.speculative.flashmap.skinny_linear import skinny_linear


@dataclass(frozen=True)
class Projection:
    """``x (T, K) -> (T, N)``."""

    weight: torch.Tensor
    """``(N, K)``, in the draft's dtype or float8_e4m3fn."""
    bias: Optional[torch.Tensor] = None
    """``(N,)``."""
    scale: Optional[torch.Tensor] = None
    """``(N,)`` float32, of e4m3 weights."""

    @classmethod
    def of(
        cls, weight: torch.Tensor, bias: Optional[torch.Tensor] = None, *, fp8: bool
    ) -> "Projection":
        """Of plain weights; ``fp8`` quantizes them where their shape allows it."""
        if not fp8 or not can_quantize(weight):
            return cls(weight, bias)
        quantized, scale = quantize_rows(weight)
        return cls(quantized, bias, scale)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        row_scale: Optional[torch.Tensor] = None,
        activation: str = "none",
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """See ``skinny_linear``."""
        options = dict(row_scale=row_scale, activation=activation, out=out)
        if self.scale is None:
            return skinny_linear(x, self.weight, self.bias, **options)
        return fp8_linear(x, self.weight, self.scale, self.bias, **options)

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.weight, self.bias, self.scale) if t is not None]
