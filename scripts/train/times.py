"""Times of the flow: the decoding-error schedule of Flow Map Language Models (arXiv:2602.16813).

On the path `x_t = (1-t) x0 + t onehot(y)`, `x0 ~ N(0, I_V)`, reading off the largest coordinate is
wrong with probability

    P_e(t) = 1 - E_z[Φ(z + t/(1-t))^(V-1)],   z ~ N(0, 1),

which stays near 1 for most of [0, 1] and falls in a narrow window. The schedule's clock is
`τ(t) = 1 - V/(V-1) P_e(t)` (eq. 25): uniform τ spreads training over the times at which tokens
are decided. Jump grids are `t = τ⁻¹(i/n)`, which reproduces the grids of the published drafts at
V = 151936. The expectation is a trapezoid sum in float64; τ⁻¹ interpolates a table.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

MAX_TIME = 0.999
"""Latest time a state is drawn at: the posterior's scale t/(1-t)² is clamped past it."""
_TABLE = 4001


def clock(times: np.ndarray, vocab_size: int) -> np.ndarray:
    """`τ(t)` of times `(n,)` in [0, 1), float64."""
    z = np.linspace(-9.0, 9.0, 1801)
    density = np.exp(-0.5 * z * z)
    density /= density.sum()
    shift = times / (1.0 - times)
    log_cdf = torch.special.log_ndtr(torch.from_numpy(z[None] + shift[:, None])).numpy()
    correct = (density * np.exp((vocab_size - 1) * log_cdf)).sum(-1)
    return 1.0 - vocab_size / (vocab_size - 1) * (1.0 - correct)


@functools.lru_cache
def _table(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    times = np.linspace(0.0, 1.0, _TABLE)[:-1]
    ticks = np.maximum.accumulate(clock(times, vocab_size).clip(0.0, 1.0))
    # Flat ends have no inverse: keep the first time of each tick.
    ticks, first = np.unique(ticks, return_index=True)
    return np.append(ticks, 1.0), np.append(times[first], 1.0)


def time_at(tick: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`τ⁻¹` of ticks in [0, 1], float32 of the same shape, at most `MAX_TIME`."""
    ticks, times = _table(vocab_size)
    values = np.interp(tick.double().cpu().numpy(), ticks, times)
    return torch.from_numpy(values).float().clamp(max=MAX_TIME).to(tick.device)


def jump_grids(vocab_size: int, most: int = 4) -> dict[str, list[float]]:
    """`{"n": [0, t_1, …, 1]}` of 1 to `most` jumps."""
    grids = {}
    for n in range(1, most + 1):
        inner = torch.arange(1, n, dtype=torch.float64) / n
        middle = time_at(inner, vocab_size).tolist() if n > 1 else []
        grids[str(n)] = [0.0, *middle, 1.0]
    return grids
