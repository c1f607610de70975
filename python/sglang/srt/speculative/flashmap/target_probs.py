"""The distribution a request samples from: temperature, then top-k, top-p and min-p jointly.

Joint means that every filter looks at the unfiltered distribution, as the normal sampler does:
top-k keeps the ``k`` most probable tokens, top-p the smallest set of most probable tokens whose
mass before each is at most ``p``, min-p the tokens of at least ``min_p`` times the largest
probability; what all keep is renormalised. (Upstream's verification applies top-k, renormalises,
then top-p, and no min-p: another distribution when both are set.)
"""

from __future__ import annotations

import torch
from sglang.kernels.ops.speculative.flashmap.sampling_inputs import LEAST_TEMPERATURE


def greedy_rows(sampling_info) -> torch.Tensor:
    """Which requests take the argmax, ``(B,)`` bool: upstream makes temperature 0 a top-k of 1."""
    return sampling_info.top_ks.view(-1) <= 1


def row_temperatures(sampling_info) -> torch.Tensor:
    """Temperatures to divide by, ``(B,)`` float32, above 0 for greedy requests too."""
    return sampling_info.temperatures.view(-1).float().clamp_min(LEAST_TEMPERATURE)


def is_filtered(sampling_info) -> bool:
    """Whether some request of the batch asks for top-k, top-p or min-p."""
    return (
        sampling_info.need_top_k_sampling
        or sampling_info.need_top_p_sampling
        or sampling_info.need_min_p_sampling
    )


def filter_mask(
    probs: torch.Tensor,
    *,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    max_top_k: int | None = None,
) -> torch.Tensor | None:
    """Tokens that survive the filters: bool like ``probs (R, V)``; filters are ``(R,)`` or None.

    ``max_top_k`` is a bound on every row's top-k, if all have one: only so many tokens are ranked
    then, which is exact, because top-k cuts all later ranks anyway. Ties at the top-k or top-p edge
    are broken by the sort order, as in the normal sampler.
    """
    keep = None
    if top_ks is not None or top_ps is not None:
        if top_ks is not None and max_top_k is not None and max_top_k < probs.shape[-1]:
            ranked, order = probs.topk(max_top_k, dim=-1)
        else:
            ranked, order = probs.sort(dim=-1, descending=True)
        kept = torch.ones_like(ranked, dtype=torch.bool)
        if top_ks is not None:
            ranks = torch.arange(ranked.shape[-1], device=probs.device)
            kept &= ranks < top_ks[:, None]
        if top_ps is not None:
            kept &= (ranked.cumsum(dim=-1) - ranked) <= top_ps[:, None]
        keep = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, kept)
    if min_ps is not None:
        above = probs >= probs.amax(dim=-1, keepdim=True) * min_ps[:, None]
        keep = above if keep is None else keep & above
    return keep


def filter_probs(probs: torch.Tensor, sampling_info, width: int = 1) -> torch.Tensor:
    """``probs (B · width, V)`` after the filters of each row's request, renormalised."""

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.view(-1).repeat_interleave(width)

    keep = filter_mask(
        probs,
        top_ks=per_row(sampling_info.top_ks) if sampling_info.need_top_k_sampling else None,
        top_ps=per_row(sampling_info.top_ps) if sampling_info.need_top_p_sampling else None,
        min_ps=per_row(sampling_info.min_ps) if sampling_info.need_min_p_sampling else None,
        max_top_k=sampling_info.max_top_k,
    )
    if keep is None:
        return probs
    probs = probs.masked_fill(~keep, 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def target_probs(logits: torch.Tensor, sampling_info, width: int) -> torch.Tensor:
    """Float32 distributions ``(B, width, V)`` that the requests of a batch sample from.

    Args:
        logits: ``(B · width, V)``, adjusted (penalties, grammar, bias), not divided by temperature.
        sampling_info: the batch's ``SamplingBatchInfo``.
        width: rows per request.
    """
    temperatures = row_temperatures(sampling_info).repeat_interleave(width)
    probs = torch.softmax(logits.float() / temperatures[:, None], dim=-1)
    return filter_probs(probs, sampling_info, width).view(-1, width, probs.shape[-1])
