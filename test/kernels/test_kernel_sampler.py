"""sample_draft and its noise: known answers, float64, distributions, kernel against reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.philox import SAMPLER_STREAM, philox_torch
from sglang.kernels.ops.speculative.flashmap.sampler import (
    gumbel_noise_torch,
    sample_draft,
    sample_draft_torch,
)

# (counter words, key words, output words): Random123's known answers for Philox-4x32-10.
KNOWN_ANSWERS = {
    "zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def word_pair(low: int, high: int) -> torch.Tensor:
    """Two 32-bit words as one int64, whose sign bit is the top bit of ``high``."""
    value = low | high << 32
    return torch.tensor([value - (1 << 64) if value >> 63 else value])


def draw(logits: torch.Tensor, temperature: float, draws: int) -> torch.Tensor:
    """Counts of ``draws`` samples from one row of logits, over seeds and offsets."""
    offsets = torch.arange(draws) % 1000
    seeds = torch.arange(draws) // 1000 - 3
    rows = logits.expand(draws, -1)
    tokens = sample_draft(rows, None, torch.full((draws,), temperature), seeds, offsets)
    return tokens.bincount(minlength=logits.numel())


@pytest.mark.parametrize("counter, key, output", KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple, key: tuple, output: tuple) -> None:
    seeds, offsets = word_pair(*key), word_pair(*counter[2:])
    words = philox_torch(seeds, offsets, torch.tensor([counter[0]]), counter[1])
    assert words.tolist() == [list(output)]


def test_noise_is_gumbel_to_float32_precision() -> None:
    columns, seeds, offsets = 400_003, torch.tensor([12]), torch.tensor([5])
    noise = gumbel_noise_torch(seeds, offsets, columns)[0]
    quads = torch.arange((columns + 3) // 4)
    words = philox_torch(seeds, offsets, quads, SAMPLER_STREAM).flatten()[:columns]
    exact = -(-(-(words.double() + 0.5) / 2**32).log1p()).log()
    likely = exact > -2  # left of that the noise cannot win
    torch.testing.assert_close(noise[likely].double(), exact[likely], rtol=0, atol=1e-5)
    assert noise.isfinite().all() and noise.max() > 11


def test_draws_follow_the_exact_noise_closely(launch: Callable) -> None:
    """Two columns, the first ahead or behind by 3e-5 of what the float64 noise says it needs."""
    seeds, offsets = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    words = philox_torch(seeds[:, None], offsets[:, None], torch.zeros(1).long(), SAMPLER_STREAM)
    v = (words[:, 0, :2].double() + 0.5) / 2**32
    # The smallest, where float32 is short of bits, and those on both sides of 2**-8.
    rows = torch.cat((v[:, 0].argsort()[:40], (v[:, 0] - 2**-8).abs().argsort()[:40]))
    lead = (-(-(-v[rows]).log1p()).log()).diff(dim=1)[:, 0]
    for margin, winner in ((3e-5, 0), (-3e-5, 1)):
        logits = torch.stack((lead + margin, torch.zeros_like(lead)), dim=1).float()
        args = (logits, None, torch.ones(len(rows)), seeds[rows], offsets[rows])
        assert (sample_draft(*args) == winner).all()
        assert (launch("sampler.sample_draft", *args) == winner).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0], ids=["T0.5", "T1", "T2"])
def test_small_vocabulary_chi_square(temperature: float) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, float("-inf"), -3.0, 0.5]])
    draws = 60_000
    counts = draw(logits, temperature, draws)
    expected = draws * (logits[0] / temperature).double().softmax(0)
    assert counts[4] == 0
    kept = expected > 0
    chi_square = ((counts - expected).square() / expected)[kept].sum()
    assert chi_square < 22.5  # 5 degrees of freedom: exceeded once in 2,300 runs; seeds are fixed


def test_wide_vocabulary_total_variation() -> None:
    vocab, draws = 301, 40_000
    logits = 2 * torch.randn(1, vocab)
    probs = logits[0].double().softmax(0)
    distance = (draw(logits, 1.0, draws) / draws - probs).abs().sum() / 2
    # The mean distance of a sample from its own distribution, by the normal approximation.
    noise = (probs * (1 - probs) / draws).sqrt().sum() * (2 / torch.pi) ** 0.5 / 2
    assert 0.8 * noise < distance < 1.2 * noise


def test_rare_column_is_drawn_as_often_as_it_should_be() -> None:
    """One column of probability 1e-5 in front and one behind, among 300,000 draws."""
    rare, draws = 1e-5, 300_000
    logits = torch.tensor([[rare, 1 - 2 * rare, rare]]).log()
    counts = draw(logits, 1.0, draws)
    assert 1 <= counts[0] <= 9 and 1 <= counts[2] <= 9  # 3 expected of each


@pytest.mark.parametrize("vocab", [1, 6, 2048, 5001])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_kernel_draws_the_references_tokens(
    dtype: torch.dtype, vocab: int, launch: Callable
) -> None:
    rows = 8
    logits = torch.randn(rows, vocab + 3).to(dtype)[:, :vocab]
    ids = torch.randperm(10 * vocab)[:vocab]
    temperatures = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.0, 2.0, 10.0, 0.0])
    seeds = torch.tensor([1, -1, 2**62, 7, 7, -(2**63), 3, 4])
    offsets = torch.tensor([0, 1, 2**40, -5, 6, 2**31, 2**32 - 1, 9])
    args = (temperatures, seeds, offsets)
    columns = sample_draft(logits, None, *args)
    assert torch.equal(sample_draft(logits, ids, *args), ids[columns])
    for splits in (1, 2, 3):
        assert torch.equal(
            launch("sampler.sample_draft", logits, ids, *args, splits=splits), ids[columns]
        )
    assert torch.equal(launch("sampler.sample_draft", logits, None, *args), columns)


def test_peaked_rows_skip_tiles_and_draw_the_same(launch: Callable) -> None:
    """Tiles far below the best so far are skipped; a peak in the last tile must still win."""
    vocab, rows = 3 * 2048 + 5, 24
    logits = torch.full((rows, vocab), -40.0)
    logits[:, 3] = torch.linspace(-25, 25, rows)
    logits[:, -1] = 0.0
    args = (torch.ones(rows), torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    expected = sample_draft_torch(logits, None, *args)
    assert set(expected.tolist()) == {3, vocab - 1}
    for splits in (1, 4):
        assert torch.equal(
            launch("sampler.sample_draft", logits, None, *args, splits=splits), expected
        )


def test_greedy_takes_the_first_maximum(launch: Callable) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [7, 2047, 4999]] = 1.0
    logits[1, [2048, 4500]] = 1.0
    zeros = torch.zeros(3, dtype=torch.int64)
    expected = torch.tensor([7, 2048, 0])
    assert torch.equal(sample_draft(logits, None, torch.zeros(3), zeros, zeros), expected)
    for splits in (1, 3):
        actual = launch(
            "sampler.sample_draft", logits, None, torch.zeros(3), zeros, zeros, splits=splits
        )
        assert torch.equal(actual, expected)


def test_a_rows_draw_does_not_depend_on_its_batch(launch: Callable) -> None:
    logits, temperatures = torch.randn(6, 900), torch.ones(6)
    seeds, offsets = torch.arange(6) % 2, torch.arange(6) // 2
    together = launch("sampler.sample_draft", logits, None, temperatures, seeds, offsets)
    order = torch.tensor([4, 1, 5])
    picked = [x[order] for x in (logits, temperatures, seeds, offsets)]
    apart = launch("sampler.sample_draft", picked[0], None, *picked[1:])
    assert torch.equal(apart, together[order])


def test_streams_draw_apart(launch: Callable) -> None:
    args = (torch.zeros(4, 3000), None, torch.ones(4), torch.arange(4), torch.arange(4))
    streams = [1, 2, 7]
    tokens = torch.stack([sample_draft(*args, stream) for stream in streams])
    assert torch.equal(tokens[0], sample_draft(*args))
    assert tokens.unique().numel() == tokens.numel()
    for stream, expected in zip(streams, tokens):
        assert torch.equal(launch("sampler.sample_draft", *args, stream), expected)


def test_equal_seed_and_offset_give_equal_noise_and_others_do_not() -> None:
    seeds, offsets = torch.tensor([1, 1, 1, 2]), torch.tensor([4, 4, 5, 4])
    noise = gumbel_noise_torch(seeds, offsets, 64)
    assert torch.equal(noise[0], noise[1])
    assert not (noise[0] == noise[2]).any() and not (noise[0] == noise[3]).any()


def test_masked_columns_are_never_drawn(launch: Callable) -> None:
    rows, vocab = 64, 40
    logits = torch.full((rows, vocab), float("-inf"))
    logits[:, [11, 38]] = torch.randn(rows, 2)
    args = (torch.ones(rows), torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    for tokens in (
        sample_draft(logits, None, *args),
        launch("sampler.sample_draft", logits, None, *args),
    ):
        assert set(tokens.tolist()) == {11, 38}


def test_the_only_column_is_drawn_whatever_its_noise(launch: Callable) -> None:
    """Column 1 of this row has one of the greatest words, which rounds to 1 in float32."""
    seeds, offsets = torch.tensor([0]), torch.tensor([30_779_326])
    quad = torch.tensor([0])
    assert philox_torch(seeds, offsets, quad, SAMPLER_STREAM)[0, 1] >= 2**32 - 128
    assert gumbel_noise_torch(seeds, offsets, 2).isfinite().all()
    args = (torch.tensor([[float("-inf"), 0.0]]), None, torch.ones(1), seeds, offsets)
    assert sample_draft(*args).tolist() == [1]
    assert launch("sampler.sample_draft", *args).tolist() == [1]
