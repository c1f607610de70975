"""``JumpBank``: drafts of several jumps without vocabulary-wide states.

Jump ``n ≥ 1`` starts from ``x_n = α_n z + Σ_m β_nm δ_m``: ``z ~ N(0, T² I_V)`` is the starting
noise, ``δ_m`` are the earlier jumps' predictions, and ``x ← ((1 - t) x + (t - s) δ) / (1 - s)``
gives the ``α, β``. It is read as ``softmax(e_n x_n) E`` and ``x_n E``, ``e_n = t_n / (1 - t_n)²``.
Let ``S`` be the tokens where some ``δ_m`` is not 0, ``a_n = e_n α_n`` and
``c_v = e_n Σ_m β_nm δ_mv``. Exactly,

    softmax(e_n x_n) E = (W + Σ_{v∈S} r_v E_v) / (Z + Σ_{v∈S} r_v),
    r_v = e^{a_n z_v} (e^{c_v} - 1),   W = Σ_v e^{a_n z_v} E_v,   Z = Σ_v e^{a_n z_v},
    x_n E = α_n z E + Σ_m β_nm δ_m E.

``z E``, ``W / Z`` and ``log Z`` depend on ``z`` alone. The bank holds them for ``M`` draws; a slot
takes one of them and then reads the embedding rows of ``S`` only. Three approximations:

1. ``δ_m`` is cut to its ``k`` most probable tokens (``--speculative-flashmap-jump-topk``).
2. On ``S``, ``z_v`` is drawn anew, as the slot's own noise at token ``v``: the draws themselves are
   not kept, and ``W`` and ``Z`` go on counting their own. The slot's noise is a function of its
   seed, its offset and ``v``, so that a token keeps its value from jump to jump and from batch to
   batch.
3. Two slots may take the same of the ``M`` draws.

Without the cut, and for slots whose own noise is their bank row's, the draft is the exact one; that
is what the tests check. ``benchmark/flashmap/jump_bank.py`` measures each approximation. All of
them change the proposal only: the rules of acceptance hold for any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.kernels.ops.speculative.flashmap.noise import (
    gaussian_at,
    gaussian_noise,
    uniform_noise,
)
from sglang.srt.speculative.flashmap.noise import Stream

# Draws whose vocabulary-wide noise is held at a time while the bank is filled.
_CHUNK = 64
# The bank's own seed: the same bank at every start.
_BANK_SEED = 0


@dataclass(frozen=True)
class BankNoise:
    """Starting noise of ``R`` slots."""

    rows: torch.Tensor
    """Draws of the bank ``(R,)`` int64."""
    seeds: torch.Tensor
    """``(R,)`` int64, with the offsets the key of the slots' own noise."""
    offsets: torch.Tensor
    """``(R,)`` int64."""


@dataclass(frozen=True)
class Prediction:
    """A jump's prediction, cut to its most probable tokens."""

    tokens: torch.Tensor
    """``(R, k)`` int64."""
    probs: torch.Tensor
    """``(R, k)`` float32, of the whole distribution."""


def jump_coefficients(grid: tuple[float, ...]) -> list[tuple[float, list[float]]]:
    """``(α_n, [β_n1, …])`` of every jump's starting state, of the times ``grid`` ``(0, …, 1)``."""
    alpha, betas = 1.0, []
    coefficients = [(alpha, list(betas))]
    for start, end in zip(grid[:-2], grid[1:-1]):
        kept = (1.0 - end) / (1.0 - start)
        alpha *= kept
        betas = [beta * kept for beta in betas] + [(end - start) / (1.0 - start)]
        coefficients.append((alpha, list(betas)))
    return coefficients


class JumpBank:
    """A bank for jumps at the times ``grid``.

    Args:
        embedding: ``(V, H)``.
        grid: jump times ``(0, …, 1)``, two jumps or more.
        size: draws ``M``.
        topk: tokens ``k`` that a prediction is cut to.
        temperature: ``T``.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        grid: tuple[float, ...],
        *,
        size: int,
        topk: int,
        temperature: float,
    ) -> None:
        self._embedding = embedding
        self._topk, self._temperature = topk, temperature
        self._coefficients = jump_coefficients(grid)
        self._scales = [t / (1.0 - t) ** 2 for t in grid[1:-1]]
        vocab, hidden = embedding.shape
        jumps = len(grid) - 2
        options = dict(device=embedding.device, dtype=embedding.dtype)
        self._noise = torch.empty(size, hidden, **options)
        self._means = torch.empty(jumps, size, hidden, **options)
        self._log_masses = torch.empty(jumps, size, device=embedding.device)
        for offsets in torch.arange(size, device=embedding.device).split(_CHUNK):
            seeds = torch.full_like(offsets, _BANK_SEED)
            z = temperature * gaussian_noise(seeds, offsets, vocab, Stream.DRAFT_NOISE.value)
            self._noise[offsets] = z.to(embedding.dtype) @ embedding
            for n, scale in enumerate(self._scales):
                logits = scale * self._coefficients[n + 1][0] * z
                self._log_masses[n, offsets] = logits.logsumexp(dim=1)
                mean = logits.softmax(dim=1).to(embedding.dtype) @ embedding
                self._means[n, offsets] = mean

    def tensors(self) -> list[torch.Tensor]:
        return [self._noise, self._means, self._log_masses]

    def draw(self, seeds: torch.Tensor, offsets: torch.Tensor) -> BankNoise:
        """The noise of slots ``seeds, offsets (R,)``, their own whatever the batch."""
        size = self._noise.shape[0]
        units = uniform_noise(seeds, offsets, 1, Stream.BANK_ROW.value)[:, 0]
        rows = (units * size).to(torch.int64).clamp_max(size - 1)
        return BankNoise(rows, seeds, offsets)

    def predict(self, logits: torch.Tensor, ids: torch.Tensor | None) -> Prediction:
        """Of draft logits ``(R, Vd)`` over the draft vocabulary ``ids (Vd,)``, None for all."""
        probs, columns = logits.float().softmax(dim=1).topk(min(self._topk, logits.shape[1]))
        return Prediction(columns if ids is None else ids[columns], probs)

    def first_state(self, noise: BankNoise) -> torch.Tensor:
        """``z E (R, H)``."""
        return self._noise[noise.rows]

    def state(
        self, noise: BankNoise, predictions: list[Prediction]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``softmax(e_n x_n) E`` and ``x_n E``, ``(R, H)`` each, after ``n`` predictions."""
        n = len(predictions)
        alpha, betas = self._coefficients[n]
        tokens = torch.cat([p.tokens for p in predictions], dim=1)
        linear = torch.cat([b * p.probs for b, p in zip(betas, predictions)], dim=1)
        # A token of several predictions counts in its first place, with all their weights.
        same = tokens[:, :, None] == tokens[:, None, :]
        first = same.to(torch.int8).argmax(dim=2) == torch.arange(
            tokens.shape[1], device=tokens.device
        )
        shift = self._scales[n - 1] * (same.float() @ linear[:, :, None])[:, :, 0]
        z = gaussian_at(noise.seeds, noise.offsets, tokens, Stream.DRAFT_NOISE.value)
        slope = self._scales[n - 1] * alpha * self._temperature
        log_mass = self._log_masses[n - 1][noise.rows][:, None]
        ratios = torch.exp(slope * z - log_mass) * torch.expm1(shift) * first
        total = 1.0 + ratios.sum(dim=1, keepdim=True)
        # Both sums over the rows of S in one product.
        weights = torch.stack([ratios / total, linear], dim=1).to(self._embedding.dtype)
        sums = torch.bmm(weights, self._embedding[tokens]).float()
        posterior = self._means[n - 1][noise.rows].float() / total + sums[:, 0]
        state = alpha * self._noise[noise.rows].float() + sums[:, 1]
        dtype = self._embedding.dtype
        return posterior.to(dtype), state.to(dtype)
