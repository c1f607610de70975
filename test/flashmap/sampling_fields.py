"""The sampling parameters of a batch, as the scheduler hands them to a worker."""

from __future__ import annotations

from types import SimpleNamespace

import torch

NO_TOP_K = 1 << 30


def sampling_info(
    temperatures: list[float],
    top_ks: list[int] | None = None,
    top_ps: list[float] | None = None,
    min_ps: list[float] | None = None,
) -> SimpleNamespace:
    """The fields of a `SamplingBatchInfo` that decide a distribution, filled as upstream does."""
    size = len(temperatures)
    bounded = top_ks is not None and max(top_ks) < NO_TOP_K
    return SimpleNamespace(
        temperatures=torch.tensor(temperatures)[:, None],
        top_ks=torch.tensor(top_ks or [NO_TOP_K] * size, dtype=torch.int32),
        top_ps=torch.tensor(top_ps or [1.0] * size),
        min_ps=torch.tensor(min_ps or [0.0] * size),
        is_all_greedy=top_ks is not None and max(top_ks) <= 1,
        is_any_greedy=top_ks is not None and min(top_ks) <= 1,
        need_top_k_sampling=top_ks is not None,
        need_top_p_sampling=top_ps is not None,
        need_min_p_sampling=min_ps is not None,
        max_top_k=max(top_ks) if bounded else None,
    )


def requests_of(info: SimpleNamespace | None, size: int) -> list[SimpleNamespace]:
    """Requests whose sampling parameters are those of `info`, greedy ones without it."""
    if info is None:
        temperatures, top_ks = [1.0] * size, [1] * size
    else:
        # As the requests gave them, not as float32 made them.
        temperatures = [round(t, 6) for t in info.temperatures.view(-1).tolist()]
        top_ks = info.top_ks.tolist()
    params = [SimpleNamespace(temperature=t, top_k=k) for t, k in zip(temperatures, top_ks)]
    return [SimpleNamespace(sampling_params=p) for p in params]
