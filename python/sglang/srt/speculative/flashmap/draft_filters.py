"""The filters of the requests of a batch, as their drafts are filtered by them."""

from __future__ import annotations

import torch


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
