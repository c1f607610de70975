"""Which numbers a request draws; the H-wide noise has the law of the vocabulary-wide one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.noise import uniform_noise_torch
from sglang.kernels.ops.speculative.flashmap.philox import SAMPLER_STREAM
from sglang.srt.speculative.flashmap.noise import (
    ROWS_PER_ANCHOR,
    SeedTable,
    Stream,
    noise_factor,
    request_seed,
    row_offsets,
)


def embedding(kind: str) -> torch.Tensor:
    """`E (V, H)`: of full rank, of rank 5 (`EᵀE` singular), or with a column of zeros."""
    full = torch.randn(60, 12) * torch.linspace(0.1, 2, 12)
    if kind == "rank-5":
        return full[:, :5] @ torch.randn(5, 12)
    if kind == "zero-column":
        full[:, 3] = 0
    return full


@pytest.mark.parametrize("kind", ["full-rank", "rank-5", "zero-column"])
def test_factor_has_the_embeddings_gram_matrix(kind: str) -> None:
    E = embedding(kind)
    factor = noise_factor(E)
    gram = E.double().T @ E.double()
    assert factor.dtype == torch.float64 and factor.isfinite().all()
    torch.testing.assert_close(factor @ factor.T, gram, rtol=0, atol=1e-10 * float(gram.max()))


@pytest.mark.parametrize("kind", ["full-rank", "rank-5"])
def test_covariance_of_the_noise(kind: str) -> None:
    """Of `z Fᵀ` and of `x0 E` alike: `EᵀE` within 5 standard errors of a Wishart matrix."""
    draws, E = 50_000, embedding(kind).double()
    gram = E.T @ E
    error = ((gram**2 + gram.diag()[:, None] * gram.diag()) / draws).sqrt()
    z = torch.randn(draws, 12, dtype=torch.float64) @ noise_factor(E).T
    x0 = torch.randn(draws, 60, dtype=torch.float64) @ E
    for noise in (z, x0):
        assert ((noise.T @ noise / draws - gram).abs() <= 5 * error + 1e-9).all()
        assert (noise.mean(0).abs() <= 5 * (gram.diag() / draws).sqrt() + 1e-9).all()


def test_factor_sums_a_long_vocabulary_in_float64() -> None:
    """Longer than one chunk; a float32 or bfloat16 sum would miss the small rows."""
    E = torch.full((20_000, 1), 1e-3)
    E[0] = 100.0
    assert float(noise_factor(E) ** 2) == pytest.approx(1e4 + 19_999e-6, rel=1e-9)


def test_request_seed() -> None:
    """A sampling seed alone decides; without one, the request id and the server's seed do."""
    assert request_seed("a", 7, 1) == request_seed("b", 7, 2)
    assert request_seed("a", 7, 1) != request_seed("a", 8, 1)
    assert request_seed("a", None, 1) == request_seed("a", None, 1)
    assert request_seed("a", None, 1) != request_seed("b", None, 1)
    assert request_seed("a", None, 1) != request_seed("a", None, 2)
    assert request_seed("a", 0, 1) != request_seed("a", None, 1)
    seeds = {request_seed(f"r{i}", None, 0) for i in range(10_000)}
    seeds |= {request_seed("", i, 0) for i in range(10_000)}
    assert len(seeds) == 20_000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seeds) < 0 < max(seeds)


def test_row_offsets_are_distinct_over_positions_and_rows() -> None:
    anchors = torch.tensor([0, 1, 2, 1_000_000])
    offsets = row_offsets(anchors, 16)
    assert offsets.dtype == torch.int64 and offsets.unique().numel() == 64
    assert torch.equal(offsets.view(4, 16)[:, 0], anchors * ROWS_PER_ANCHOR)
    widest = row_offsets(torch.tensor([0, 1]), ROWS_PER_ANCHOR)
    assert torch.equal(widest, torch.arange(2 * ROWS_PER_ANCHOR))
    with pytest.raises(AssertionError):
        row_offsets(anchors, ROWS_PER_ANCHOR + 1)


def test_streams_of_one_seed_draw_different_numbers() -> None:
    seeds, offsets = torch.tensor([7]), torch.tensor([9])
    draws = [uniform_noise_torch(seeds, offsets, 64, stream.value) for stream in Stream]
    draws.append(uniform_noise_torch(seeds, offsets, 64, SAMPLER_STREAM))
    assert torch.cat(draws).unique().numel() == 64 * (len(Stream) + 1)


def test_seed_table_places_requests_at_their_rows() -> None:
    def request(rid: str, seed: int | None) -> SimpleNamespace:
        return SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed))

    table = SeedTable(5, "cpu", server_seed=3)
    requests = [request("a", None), request("b", 11)]
    table.place(requests, torch.tensor([4, 1], dtype=torch.int32))
    expected = [0, request_seed("b", 11, 3), 0, 0, request_seed("a", None, 3)]
    assert table.seeds.tolist() == expected
    table.place([request("c", 12)], torch.tensor([4]))
    assert table.seeds.tolist() == [*expected[:4], request_seed("c", 12, 3)]
