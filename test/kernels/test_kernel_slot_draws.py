"""slot_draws: float64 keys, the distribution of pairs, sample_draft, kernel against reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.philox import SAMPLER_STREAM
from sglang.kernels.ops.speculative.flashmap.sampler import gumbel_noise_torch, sample_draft
from sglang.kernels.ops.speculative.flashmap.slot_draws import slot_draws

NINF = float("-inf")
STREAM, LEVELS = 5, 4


def arguments(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    temperatures: list[float],
    drawn: list[bool],
    count: int,
) -> tuple[Any, ...]:
    """All of them; what a slot's tokens and probs hold before is told from all that is written."""
    batch, draws, slots, _ = logits.shape
    rows = torch.arange(batch * draws * slots)
    seeds = (rows // (draws * slots) - 1) * 2**40
    weights = 1 / torch.arange(1, LEVELS * count + 1).view(LEVELS, count)
    tokens = -1 - torch.arange(rows.numel() * count).view(batch, slots, draws * count)
    probs = torch.rand(*tokens.shape, draws) * torch.rand(batch, slots, 1, 1)
    drawn = torch.tensor(drawn, dtype=torch.bool)
    noise = (torch.tensor(temperatures), seeds, rows * 3, STREAM)
    return logits, ids, *noise, drawn, weights, tokens, probs


def profiles(args: tuple) -> torch.Tensor:
    """``(B, K, count)``, by the likeliest of candidate 0's choices before they are written over."""
    weights, _, probs = args[-3:]
    top = probs[:, :, : weights.shape[1], 0].max(dim=2).values
    return weights[(top * LEVELS).floor().long().clamp(max=LEVELS - 1)]


def copied(args: tuple) -> tuple:
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)


def write(args: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """What the reference writes over tokens and probs."""
    args = copied(args)
    assert slot_draws(*args) is None
    return args[-2:]


def first_rows(values: torch.Tensor, draws: int, slots: int) -> torch.Tensor:
    """Those of candidate 0 of ``(B N K,)``."""
    return values.view(-1, draws, slots)[:, 0].flatten()


@pytest.mark.parametrize(
    "count, dtype",
    [(1, torch.float16), (4, torch.bfloat16), (8, torch.float32)],
    ids=["1-fp16", "4-bf16", "8-fp32"],
)
@pytest.mark.parametrize("draws", [1, 3], ids=["N1", "N3"])
@pytest.mark.parametrize("vocab", [11, 4500], ids=["one-tile", "three-tiles"])
def test_kernel_equals_the_reference_and_flags_choose_the_requests(
    vocab: int, draws: int, count: int, dtype: torch.dtype, launch_and_args: Callable
) -> None:
    slots, temperatures = 2, [0.7, 1.0, 0.0, 2.0]
    drawn = [True, False, True, True]
    logits = (2 * torch.randn(4, draws, slots, vocab)).to(dtype)
    ids = torch.randperm(3 * vocab)[:vocab] if count > 1 else None
    args = arguments(logits, ids, temperatures, drawn, count)
    tokens, probs = write(args)
    for splits in (1, 3) if vocab > 2048 else (1,):
        result, after = launch_and_args("slot_draws.slot_draws", *copied(args), splits=splits)
        assert result is None
        assert torch.equal(after[-2], tokens) and torch.equal(after[-1], probs)

    _, before, probs_before = args[-3:]
    assert torch.equal(tokens[1], before[1]) and torch.equal(probs[1], probs_before[1])
    assert torch.equal(tokens[..., count:], before[..., count:])
    assert (probs[drawn][..., 1:] == 0).all() and (probs[drawn][:, :, count:] == 0).all()
    assert torch.equal(probs[drawn][:, :, :count, 0], profiles(args)[drawn])
    assert profiles(args)[..., 0].unique().numel() > 1

    heat = torch.tensor([0.7, 1.0, 1.0, 2.0]).repeat_interleave(slots)
    seeds, offsets = (first_rows(x, draws, slots) for x in args[3:5])
    rows = logits[:, 0].flatten(0, 1)
    picked = tokens[drawn][..., :count]
    sampled = sample_draft(rows, ids, heat, seeds, offsets, STREAM).view(4, slots)
    assert torch.equal(picked[..., 0], sampled[drawn])
    keys = rows.double() / heat[:, None] + gumbel_noise_torch(seeds, offsets, vocab, STREAM)
    order = keys.view(4, slots, vocab)[drawn].argsort(dim=-1, descending=True)[..., :count]
    assert torch.equal(picked, order if ids is None else ids[order])


@pytest.mark.parametrize("splits", [1, 2])
def test_draws_end_when_the_columns_do(splits: int, launch_and_args: Callable) -> None:
    """Three columns of one slot, one of the other, none of the last; and fewer than ``count``."""
    logits = torch.full((1, 2, 3, 3000), NINF)
    logits[0, 0, 0, [7, 40, 2999]] = torch.tensor([0.0, 1.0, 2.0])
    logits[0, 0, 1, 2500] = -5.0
    logits[0, 1] = 9.0
    ids = torch.arange(3000) + 50
    few = torch.zeros(1, 1, 1, 2)
    for args, found in (
        (arguments(logits, ids, [1.0], [True], 4), [{57, 90, 3049}, {2550}, set()]),
        (arguments(few, None, [1.0], [True], 4), [{0, 1}]),
    ):
        written = launch_and_args("slot_draws.slot_draws", *copied(args), splits=splits)[1][-2:]
        for tokens, probs in (write(args), written):
            for slot, wanted in enumerate(found):
                chances, names = probs[0, slot, :, 0], tokens[0, slot, :4].tolist()
                assert set(names[: len(wanted)]) == wanted
                assert torch.equal(
                    chances[: len(wanted)], profiles(args)[0, slot, : len(wanted)]
                )
                assert (chances[len(wanted) :] == 0).all()
                first = 0 if args[1] is None else 50
                assert names[len(wanted) :] == [first] * (4 - len(wanted))


def test_of_equal_keys_the_lower_columns_are_drawn_in_order(launch_and_args: Callable) -> None:
    """Logits so large that float32 has no room for noise; a larger one comes after the equals."""
    logits = torch.full((1, 1, 1, 5000), 1e4)
    logits[..., [3, 900, 2500, 4700]] = 1e12
    logits[..., 4800] = 2e12
    for count in (2, 3, 5):
        args = arguments(logits, None, [1.0], [True], count)
        expected = [4800, 3, 900, 2500, 4700][:count]
        assert write(args)[0].flatten().tolist() == expected
        for splits in (1, 3):
            after = launch_and_args("slot_draws.slot_draws", *copied(args), splits=splits)[1]
            assert after[-2].flatten().tolist() == expected


def test_tiles_far_below_are_skipped_and_change_no_draw(launch_and_args: Callable) -> None:
    """As many columns as are drawn lead the first tile, and as many of logit 0 the last."""
    lead = torch.tensor([-25, 1.0, 1.5, 2.0, 3.0, 25])
    logits = torch.full((6, 1, 1, 2 * 2048 + 5), -40.0)
    logits[:, 0, 0, 3:7], logits[:, 0, 0, -4:] = lead[:, None], 0.0
    args = arguments(logits, None, [1.0] * 6, [True] * 6, 4)
    tokens, _ = write(args)
    late = (tokens[:, 0] > 7).sum(dim=1)
    assert late[0] == 4 and late[5] == 0 and late[1:5].any()
    after = launch_and_args("slot_draws.slot_draws", *copied(args), splits=1)[1]
    assert torch.equal(after[-2], tokens)


def test_pairs_have_the_distribution_of_draws_without_replacement() -> None:
    rows, temperature = 100_000, 0.8
    logits = torch.tensor([1.0, 0.0, -1.5, 1.6, 0.4])
    args = (
        *(logits.expand(rows, 1, 1, 5).contiguous(), None, torch.full((rows,), temperature)),
        *(torch.arange(rows) // 1000 - 3, torch.arange(rows) % 1000, SAMPLER_STREAM),
        *(torch.ones(rows, dtype=torch.bool), torch.ones(LEVELS, 2)),
        *(torch.zeros(rows, 1, 2, dtype=torch.int64), torch.zeros(rows, 1, 2, 1)),
    )
    tokens, _ = write(args)
    first, second = tokens[:, 0].unbind(1)
    counts = (5 * first + second).bincount(minlength=25)
    q = (logits.double() / temperature).softmax(0)
    exact = (q[:, None] * q / (1 - q[:, None])).fill_diagonal_(0).flatten()
    assert (counts[exact == 0] == 0).all()
    distance = (counts / rows - exact).abs().sum() / 2
    # The mean distance of a sample from its own distribution, by the normal approximation.
    noise = (exact * (1 - exact) / rows).sqrt().sum() * (2 / torch.pi) ** 0.5 / 2
    assert distance < 1.5 * noise


def test_empty_batch(launch_and_args: Callable) -> None:
    args = arguments(torch.zeros(0, 2, 3, 40), None, [], [], 4)
    assert write(args)[0].shape == (0, 3, 8)
    assert launch_and_args("slot_draws.slot_draws", *args)[1][-1].shape == (0, 3, 8, 2)
