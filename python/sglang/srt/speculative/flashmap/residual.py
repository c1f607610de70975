"""The residual stream of a draft's DiT: branches read its AdaLN and are added with a gate.

Two forms of one arithmetic. ``ModulatedStream`` runs a kernel between branches, which adds what the
last one gave and norms the sum, and serves any number of jumps. ``FusedStream`` leaves that to the
products at both ends (``kernels/ops/speculative/flashmap/residual_linear.py``); it takes
projections that hold their modulation and rows as few as a block or four.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from sglang.kernels.ops.speculative.flashmap.adaln import adaln
from sglang.kernels.ops.speculative.flashmap.residual_linear import add_linear, normed_linear
from sglang.srt.speculative.flashmap.projection import Modulation, Projection


class ModulatedStream:
    """``x (T, d)``, and a branch that is not added yet."""

    def __init__(self, x: torch.Tensor, eps: float) -> None:
        self._x, self._eps = x, eps
        self._branch: Optional[torch.Tensor] = None
        self._gate: Optional[torch.Tensor] = None

    @classmethod
    def start(
        cls, projection: Projection, x: torch.Tensor, eps: float, **options: Any
    ) -> "ModulatedStream":
        """Of ``projection(x, **options)``."""
        return cls(projection(x, **options), eps)

    def normed(self, modulation: Modulation) -> torch.Tensor:
        """Its AdaLN ``(T, d)``."""
        self._x, h = adaln(
            self._x, self._branch, self._gate, modulation.scale1, modulation.shift, self._eps
        )
        self._branch = self._gate = None
        return h

    def read(self, projection: Projection, modulation: Modulation, **options: Any) -> torch.Tensor:
        """``projection(AdaLN(x), **options)``."""
        return projection(self.normed(modulation), **options)

    def add(self, projection: Projection, x: torch.Tensor, gate: torch.Tensor) -> None:
        """Add ``gate · projection(x)``."""
        self._branch, self._gate = projection(x), gate


class FusedStream:
    """``x (T, d)`` and its rows' moments."""

    def __init__(self, x: torch.Tensor, moments: torch.Tensor, eps: float) -> None:
        self._x, self._moments, self._eps = x, moments, eps

    @classmethod
    def start(
        cls,
        projection: Projection,
        x: torch.Tensor,
        eps: float,
        row_scale: Optional[torch.Tensor] = None,
    ) -> "FusedStream":
        """Of ``projection(x, row_scale=row_scale)``."""
        weight, bias, scale = projection.weight, projection.bias, projection.scale
        return cls(*add_linear(x, weight, bias, scale=scale, row_scale=row_scale), eps)

    def read(self, projection: Projection, modulation: Modulation, **options: Any) -> torch.Tensor:
        """``projection(LN(x), **options)``; the projection holds the modulation."""
        return normed_linear(
            self._x,
            self._moments,
            projection.weight,
            projection.bias,
            projection.column_sums,
            self._eps,
            scale=projection.scale,
            **options,
        )

    def add(self, projection: Projection, x: torch.Tensor, gate: torch.Tensor) -> None:
        """Add ``gate · projection(x)``."""
        self._x, self._moments = add_linear(
            x,
            projection.weight,
            projection.bias,
            scale=projection.scale,
            residual=self._x,
            gate=gate,
        )
