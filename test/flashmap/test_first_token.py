"""The first token: the target's filtered distribution, drawn by the request's own numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sampling_fields import NO_TOP_K, sampling_info
from sglang.srt.sampling.sample_seeds import params_of_sample
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.flashmap.first_token import FirstTokenSampler
from sglang.srt.speculative.flashmap.noise import SeedTable, request_seed
from sglang.srt.speculative.flashmap.target_probs import filter_probs

VOCAB = 30


def draw(probs: torch.Tensor, info: SimpleNamespace, positions: torch.Tensor) -> torch.Tensor:
    sampler = FirstTokenSampler.__new__(FirstTokenSampler)  # the draw needs no server
    tokens, capture = sampler._sample_from_probs(probs, info, positions, False)
    assert tokens.dtype == torch.int32 and capture is None
    return tokens


def seeds_of(*names: int) -> torch.Tensor:
    return torch.tensor([request_seed("any", name, 0) for name in names])


@pytest.mark.parametrize(
    "filters",
    [{}, dict(top_ks=[6]), dict(top_ps=[0.6]), dict(min_ps=[0.2]), dict(top_ks=[9], min_ps=[0.1])],
    ids=["none", "top-k", "top-p", "min-p", "top-k-and-min-p"],
)
def test_distribution(filters: dict) -> None:
    draws = 20_000
    row = torch.randn(1, VOCAB).mul(1.5).softmax(-1)
    expected = filter_probs(row, sampling_info([1.0], **filters))[0].double()
    info = sampling_info([1.0] * draws, **{k: v * draws for k, v in filters.items()})
    info.sampling_seed = seeds_of(*range(draws))
    tokens = draw(row.expand(draws, -1), info, torch.full((draws,), 4))
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    frequent = expected * draws > 20
    error = (counts / draws - expected) / (expected * (1 - expected) / draws).sqrt()
    assert error[frequent].abs().max() < 4


def test_a_draw_depends_on_its_own_row_only() -> None:
    probs = torch.randn(3, VOCAB).softmax(-1)
    info = sampling_info([1.0] * 3)
    info.sampling_seed = seeds_of(5, 6, 7)
    positions = torch.tensor([3, 9, 4])
    together = draw(probs, info, positions)
    for i in range(3):
        alone = sampling_info([1.0])
        alone.sampling_seed = info.sampling_seed[i : i + 1]
        assert draw(probs[i : i + 1], alone, positions[i : i + 1]) == together[i]


def test_seed_and_position_both_matter() -> None:
    probs = torch.full((200, VOCAB), 1 / VOCAB)
    info = sampling_info([1.0] * 200)
    info.sampling_seed = seeds_of(*range(100), *([1] * 100))
    tokens = draw(probs, info, torch.tensor([7] * 100 + list(range(100))))
    assert len(tokens[:100].unique()) > VOCAB / 2 and len(tokens[100:].unique()) > VOCAB / 2


def test_greedy_rows_of_a_sampled_batch() -> None:
    probs = torch.randn(64, VOCAB).softmax(-1)
    info = sampling_info([1.0] * 64, top_ks=[1, NO_TOP_K] * 32)
    info.sampling_seed = seeds_of(*range(64))
    tokens = draw(probs, info, torch.zeros(64, dtype=torch.int64))
    argmax = probs.argmax(-1)
    assert torch.equal(tokens[::2], argmax[::2].int())
    assert not torch.equal(tokens[1::2], argmax[1::2].int())


def test_deterministic_servers_give_every_request_a_seed() -> None:
    def request(rid: str, seed: int | None) -> SimpleNamespace:
        return SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed))

    table = SeedTable(4, "cpu", server_seed=3, default_seed=42)
    table.place([request("a", None), request("b", None), request("c", 7)], torch.arange(3))
    assert table.seeds[:3].tolist() == seeds_of(42, 42, 7).tolist()


@pytest.mark.parametrize("seed", [None, 7, -(2**63), 2**63 - 1])
def test_samples_of_one_request_have_seeds_of_their_own(seed: int | None) -> None:
    params = SamplingParams(sampling_seed=seed, temperature=0.5)
    samples = [params_of_sample(params, index) for index in range(3)]
    seeds = [sample.sampling_seed for sample in samples]
    assert params.sampling_seed == seed == seeds[0]
    assert all(sample.temperature == 0.5 for sample in samples)
    if seed is not None:
        assert len(set(seeds)) == 3 and all(-(2**63) <= s < 2**63 for s in seeds)
