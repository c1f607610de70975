"""``Projection``: one linear layer of the draft, in 16 bits or with e4m3 weights.

A layer that follows an AdaLN may hold the modulation of one jump in its weights:

    (LN(x) · s + t) Wᵀ + b = LN(x) (W diag(s))ᵀ + (b + W t),

so that what is left in front of it is a plain LayerNorm, which ``normed_linear`` takes into the
product. A draft of several jumps would need the weights once a jump, and keeps its AdaLNs.
"""

from __future__ import annotations

import dataclasses
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
    column_sums: Optional[torch.Tensor] = None
    """Sums of the weight's rows, ``(N,)`` float32, if it holds a modulation."""

    @classmethod
    def of(
        cls, weight: torch.Tensor, bias: Optional[torch.Tensor] = None, *, fp8: bool
    ) -> "Projection":
        """Of plain weights; ``fp8`` quantizes them where their shape allows it."""
        if not fp8 or not can_quantize(weight):
            return cls(weight, bias)
        quantized, scale = quantize_rows(weight)
        return cls(quantized, bias, scale)

    @classmethod
    def modulated(
        cls,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        modulation: "Modulation",
        *,
        fp8: bool,
    ) -> "Projection":
        """Of weights that follow an AdaLN of ``modulation``, which they take in."""
        wide = weight.float()
        shifted = wide @ modulation.shift.float()
        shifted = shifted if bias is None else shifted + bias.float()
        scaled = wide * modulation.scale1.float()
        made = cls.of(scaled.to(weight.dtype), shifted.to(weight.dtype), fp8=fp8)
        sums = made.weight.float().sum(dim=1)
        sums = sums if made.scale is None else sums * made.scale
        return dataclasses.replace(made, column_sums=sums)

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

    def rows(self, start: int, end: int) -> "Projection":
        """Onto output channels ``start`` to ``end`` alone, of a weight that is not packed."""
        held = (self.weight, self.bias, self.scale, self.column_sums)
        return Projection(*(None if t is None else t[start:end] for t in held))

    def tensors(self) -> list[torch.Tensor]:
        held = (self.weight, self.bias, self.scale, self.column_sums)
        return [t for t in held if t is not None]


@dataclass(frozen=True)
class Modulation:
    """AdaLN of one norm at one jump: ``LN(x) * scale1 + shift``, then ``gate`` on the branch."""

    scale1: torch.Tensor
    """``(d,)``, one plus the scale."""
    shift: torch.Tensor
    """``(d,)``."""
    gate: torch.Tensor
    """``(d,)``."""

    def folded(self) -> "Modulation":
        """What is left of it once a projection holds it."""
        return Modulation(torch.ones_like(self.scale1), torch.zeros_like(self.shift), self.gate)
