"""target_probs: the same filtered distribution as the normal sampler's, row by row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sampling_fields import NO_TOP_K, sampling_info
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.speculative.flashmap.target_probs import target_probs

WIDTH = 3


def normal_sampler(logits: torch.Tensor, info: SimpleNamespace) -> torch.Tensor:
    """The distribution that upstream's torch sampler draws from."""
    rows = [t.view(-1).repeat_interleave(WIDTH) for t in (info.top_ks, info.top_ps, info.min_ps)]
    temperatures = info.temperatures.view(-1).repeat_interleave(WIDTH)
    probs = torch.softmax(logits / temperatures[:, None], dim=-1)
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        *rows,
        info.need_min_p_sampling,
        sampling_seed=None,
        positions=torch.zeros(len(probs), dtype=torch.int64),
        return_filtered_probs=True,
    )
    dense = torch.zeros_like(probs).scatter_(1, ids.long(), weights)
    return dense / dense.sum(-1, keepdim=True)


FILTERS = {
    "temperature": {},
    "top-k": dict(top_ks=[5, 1, 40, NO_TOP_K]),
    "top-k-of-all": dict(top_ks=[5, 1, 40, 3]),
    "top-k-past-the-vocabulary": dict(top_ks=[5, 1, 40, 300]),
    "top-p": dict(top_ps=[0.3, 0.9, 0.999, 1.0]),
    "min-p": dict(min_ps=[0.2, 0.01, 0.0, 0.9]),
    "top-k-top-p": dict(top_ks=[5, 20, 40, 3], top_ps=[0.8, 0.6, 0.95, 1.0]),
    "all": dict(top_ks=[5, 20, 40, 3], top_ps=[0.8, 0.6, 0.95, 1.0], min_ps=[0.1, 0.0, 0.05, 0.3]),
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_equals_the_normal_sampler(filters: dict) -> None:
    info = sampling_info([1.0, 0.6, 1.7, 0.2], **filters)
    logits = 2 * torch.randn(4 * WIDTH, 200)
    probs = target_probs(logits, info, WIDTH)
    expected = normal_sampler(logits, info)
    assert probs.shape == (4, WIDTH, 200) and probs.dtype == torch.float32
    probs = probs.flatten(0, 1)
    # A float32 running sum may pass top-p 1.0 in the tail, which the normal sampler then cuts.
    common = (probs > 1e-6) | (expected > 1e-6)
    assert torch.equal((probs > 0) & common, (expected > 0) & common)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-6)


ROW = [0.35, 0.25, 0.20, 0.05] + [0.03] * 5


@pytest.mark.parametrize(
    "filters, support",
    [
        (dict(top_ks=[4], top_ps=[0.82]), {0, 1, 2, 3}),  # top-p after renormalising would drop 3
        (dict(top_ps=[0.82]), {0, 1, 2, 3}),
        (dict(top_ps=[0.79]), {0, 1, 2}),
        (dict(min_ps=[0.3]), {0, 1, 2}),
        (dict(top_ks=[2], min_ps=[0.3]), {0, 1}),
        (dict(top_ks=[1]), {0}),
        (dict(top_ps=[0.0]), {0}),
    ],
    ids=[
        "top-k-and-top-p",
        "top-p",
        "top-p-edge",
        "min-p",
        "top-k-and-min-p",
        "top-k-1",
        "top-p-0",
    ],
)
def test_filters_look_at_the_unfiltered_row(filters: dict, support: set) -> None:
    logits = torch.tensor([ROW]).log()
    (probs,) = target_probs(logits, sampling_info([1.0], **filters), 1)
    assert set(probs[0].nonzero().flatten().tolist()) == support
    kept = torch.tensor([p if i in support else 0.0 for i, p in enumerate(ROW)])
    torch.testing.assert_close(probs[0], kept / kept.sum())


def test_a_banned_token_stays_banned() -> None:
    logits = torch.randn(WIDTH, 50)
    logits[:, 7] = float("-inf")
    probs = target_probs(logits, sampling_info([2.0], top_ps=[1.0], top_ks=[50]), WIDTH)
    assert (probs[..., 7] == 0).all() and (probs.sum(-1) - 1).abs().max() < 1e-5


def test_rows_of_bfloat16_logits_and_tiny_temperatures_are_finite() -> None:
    logits = (30 * torch.randn(WIDTH, 50)).bfloat16()
    probs = target_probs(logits, sampling_info([0.0]), WIDTH)
    assert torch.equal(probs[0].argmax(-1), logits.argmax(-1))
    assert probs.isfinite().all() and (probs.sum(-1) - 1).abs().max() < 1e-5
