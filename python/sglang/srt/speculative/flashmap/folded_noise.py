"""``FoldedNoise``: a single jump's input in one product, from the eigenvectors of ``EᵀE``.

A draft reads its noise ``x0`` as ``y = x0 E ~ N(0, T² EᵀE)`` and embeds ``x_embed(u + g
noise_norm(y))``, ``u`` the uniform state. With ``EᵀE = Q diag(λ) Qᵀ``, ``y = T (√λ z) Qᵀ`` for
standard normal ``z`` has that law, and, ``w`` being the norm's weight and ``W, b`` x_embed's,

    x_embed(u + g noise_norm(y)) = (u Wᵀ + b) + g T r (z M),
    r = rsqrt(T² Σ λ z² / H + eps),   M = diag(√λ) Qᵀ diag(w) Wᵀ.

The norm's products and x_embed are one ``(H, d)`` matrix, computed in float64 and rounded once;
the Cholesky form reads ``(H, H)`` and ``(H, d)`` and rounds four times on the way.

The cut (``error > 0``) leaves out directions ``i`` of little ``‖M_i‖``. It adds their mean
``Σ λ_i`` to what ``r`` sums, so that two errors remain, relative to the noise term's root mean
square: the directions themselves, ``√(Σ_cut ‖M_i‖² / Σ ‖M_i‖²)``, and the spread of their sum in
``r``, at first order ``√(2 Σ_cut λ_i²) / (2 Σ λ_i)``. As many directions are cut as keep the sum of
both at most ``error``. The output stays lossless: the proposal is what is drafted from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import torch
from sglang.kernels.ops.speculative.flashmap.noise import norm_factor, normed_noise
from sglang.srt.speculative.flashmap.noise import Stream, embedding_gram
from sglang.srt.speculative.flashmap.projection import Projection

# Directions are kept in multiples of this, a tile of the product's reduction.
_MULTIPLE = 64


@dataclass(frozen=True)
class NormedNoise:
    """Draws of ``R`` rows as the folded form multiplies them."""

    draws: torch.Tensor
    """``(R, width)`` in the draft's dtype."""
    factor: torch.Tensor
    """``g T r (R,)`` float32."""


@dataclass(frozen=True)
class FoldedNoise:
    """Standard normal ``(rows, width)``, or what ``draw`` returns, ``-> (rows, d)``: the embedded
    input of the jump from noise."""

    projection: Projection
    """Weight ``Mᵀ (d, width)``, bias ``u Wᵀ + b (d,)``."""
    dtype: torch.dtype
    """Of the noise that is multiplied, and of the result."""
    variances: torch.Tensor
    """``T² λ / H (width,)`` float32 of the kept directions."""
    offset: float
    """``eps`` and the mean of what was cut."""
    gate: torch.Tensor
    """``g T (1,)`` float32."""
    error: float
    """Bound of the cut's relative error, 0 without a cut."""

    @classmethod
    def fold(
        cls,
        embedding: torch.Tensor,
        *,
        uniform: torch.Tensor,
        norm_weight: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        gate: torch.Tensor,
        eps: float,
        temperature: float,
        max_error: float,
        fp8: bool = False,
    ) -> "FoldedNoise":
        """Fold ``embedding (V, H)``, ``uniform (1, H)``, ``norm_weight (H,)`` and x_embed's
        ``weight (d, H)`` and ``bias (d,)``, in the dtype of ``weight`` or with e4m3 weights."""
        hidden = embedding.shape[1]
        values, vectors = torch.linalg.eigh(embedding_gram(embedding))
        values = values.clamp_min(0)
        folded = (vectors * values.sqrt()).T * norm_weight.double() @ weight.double().T
        energy = folded.square().sum(dim=1)
        order = energy.argsort(descending=True)
        values, folded, energy = values[order], folded[order], energy[order]
        kept, error = _kept_directions(values, energy, max_error)
        scaled = values * (temperature**2 / hidden)
        base = uniform.double() @ weight.double().T + bias.double()
        return cls(
            projection=Projection.of(
                folded[:kept].T.to(weight.dtype).contiguous(), base[0].to(weight.dtype), fp8=fp8
            ),
            dtype=weight.dtype,
            variances=scaled[:kept].float(),
            offset=eps + float(scaled[kept:].sum()),
            gate=gate.float() * temperature,
            error=error,
        )

    @property
    def width(self) -> int:
        """Standard normal draws per row."""
        return self.variances.shape[0]

    def draw(self, seeds: torch.Tensor, offsets: torch.Tensor) -> NormedNoise:
        """For rows of ``seeds, offsets (R,)`` int64."""
        return NormedNoise(
            *normed_noise(
                seeds,
                offsets,
                self.variances,
                self.gate,
                self.offset,
                self.dtype,
                Stream.DRAFT_NOISE.value,
            )
        )

    def normed(self, noise: Union[torch.Tensor, NormedNoise]) -> NormedNoise:
        if isinstance(noise, NormedNoise):
            return noise
        factor = norm_factor(noise, self.variances, self.gate, self.offset)
        return NormedNoise(noise.to(self.dtype), factor)

    def __call__(self, noise: Union[torch.Tensor, NormedNoise]) -> torch.Tensor:
        normed = self.normed(noise)
        return self.projection(normed.draws, row_scale=normed.factor)


def _kept_directions(
    values: torch.Tensor, energy: torch.Tensor, max_error: float
) -> tuple[int, float]:
    """How many leading directions to keep, and the error that leaves; float64 ``(H,)`` inputs."""
    size = values.shape[0]
    if max_error <= 0:
        return size, 0.0

    def tails(terms: torch.Tensor) -> torch.Tensor:
        """Sums of ``terms[n:]`` for ``n = 0 … H``."""
        return torch.cat([terms.flip(0).cumsum(0).flip(0), terms.new_zeros(1)])

    errors = (tails(energy) / energy.sum()).sqrt()
    errors = errors + (2 * tails(values.square())).sqrt() / (2 * values.sum())
    least = int((errors <= max_error).to(torch.int8).argmax())
    kept = min(-(-max(least, 1) // _MULTIPLE) * _MULTIPLE, size)
    return kept, float(errors[kept])
