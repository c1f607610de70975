"""How the drafts of a batch's requests are drawn: at which temperatures, and with which filters.

Both are free choices: an accept rule is lossless for every distribution that drafts are drawn from,
as long as it divides by the same one. A draft's slots know each other less than the target's
conditionals do, which makes them broader; a factor below 1 undoes some of it, and rejection keeps
more (``docs/flashmap.md`` has what was measured).
"""

from __future__ import annotations

import torch
from sglang.srt.speculative.flashmap.target_probs import (
    LEAST_TEMPERATURE,
    greedy_rows,
    row_temperatures,
)


def draft_temperatures(sampling_info, factor: float) -> torch.Tensor:
    """``factor`` times each request's temperature, ``(B,)`` float32; 0 drafts the argmax.

    ``sampling_info``: the batch's ``SamplingBatchInfo``.
    """
    temperatures = (row_temperatures(sampling_info) * factor).clamp_min(LEAST_TEMPERATURE)
    return torch.where(greedy_rows(sampling_info), 0.0, temperatures)


def draft_filters(sampling_info, size: int, device: torch.device | str) -> torch.Tensor:
    """Top-k, top-p and min-p of each request ``(size, 3)`` float32, 0 where it has none.

    ``sampling_info``: the batch's ``SamplingBatchInfo``, or None.
    """
    filters = torch.zeros(size, 3, dtype=torch.float32, device=device)
    if sampling_info is None or sampling_info.is_all_greedy:
        return filters
    if sampling_info.need_top_k_sampling:
        filters[:, 0] = sampling_info.top_ks
    if sampling_info.need_top_p_sampling:
        filters[:, 1] = torch.where(sampling_info.top_ps < 1, sampling_info.top_ps, 0.0)
    if sampling_info.need_min_p_sampling:
        filters[:, 2] = sampling_info.min_ps
    return filters
