"""slot_choices: float64, filters and repeated columns, kernel against reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.slot_choices import slot_choices

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_token(tokens: torch.Tensor, probs: torch.Tensor) -> list[dict[int, list[float]]]:
    """A dictionary a slot; of a token that is listed twice, the entry that counts."""
    slots = zip(tokens.flatten(0, 1).tolist(), probs.flatten(0, 1).tolist())
    return [
        {token: row for token, row in zip(reversed(names), reversed(rows))} for names, rows in slots
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab, count", [(7, 3), (9001, 4)], ids=["one-tile", "two-tiles"])
def test_choices_are_the_likeliest_and_what_every_draw_gives_them(
    vocab: int, count: int, dtype: torch.dtype, launch: Callable
) -> None:
    batch, draws, slots = 2, 2, 3
    # Distinct values in any dtype, the tops of rows differing; the first draw's first is shared.
    steps = torch.arange(vocab).clamp_max(500).flip(0)
    logits = torch.stack([steps[torch.randperm(vocab)] for _ in range(batch * draws * slots)])
    logits = (-logits / 64).view(batch, draws, slots, vocab)
    logits[:, 0, 0, 5], logits[:, 1, 0, 5] = 3.0, 4.0
    logits = logits.to(dtype)
    temperatures = torch.tensor([0.0, 0.7])
    ids = torch.randperm(3 * vocab)[:vocab]
    exact = logits.double() / torch.tensor([1.0, 0.7]).double()[:, None, None, None]
    exact = exact.softmax(dim=-1)
    top = exact.topk(count, dim=-1).indices
    results = (
        slot_choices(logits, ids, temperatures, count),
        launch("slot_choices.slot_choices", logits, ids, temperatures, count),
    )
    for tokens, probs in results:
        assert tokens.shape == (batch, slots, draws * count) and tokens.dtype == torch.int64
        assert probs.shape == (*tokens.shape, draws) and probs.dtype == torch.float32
        for index, found in enumerate(by_token(tokens, probs)):
            row, slot = divmod(index, slots)
            wanted = set(top[row, :, slot].flatten().tolist())
            assert set(found) == {int(ids[column]) for column in wanted}
            for column in wanted:
                actual = torch.tensor(found[int(ids[column])]).double()
                torch.testing.assert_close(actual, exact[row, :, slot, column], rtol=1e-5, atol=0)
        assert (probs[:, 0] == 0).all(dim=-1).sum() >= batch  # column 5 twice


def test_columns_left_out_have_no_probability(launch: Callable) -> None:
    logits = torch.full((1, 2, 1, 50), float("-inf"))
    logits[0, 0, 0, 30], logits[0, 1, 0, [20, 30]] = 2.0, torch.tensor([0.0, 1.0])
    for tokens, probs in (
        slot_choices(logits, None, torch.ones(1), 3),
        launch("slot_choices.slot_choices", logits, None, torch.ones(1), 3),
    ):
        likely = {
            token: row for token, row in zip(tokens.flatten().tolist(), probs[0, 0]) if any(row)
        }
        assert set(likely) == {20, 30}
        torch.testing.assert_close(likely[20], torch.tensor([0.0, 1 / (1 + torch.e)]))
        torch.testing.assert_close(likely[30], torch.tensor([1.0, torch.e / (1 + torch.e)]))


def test_empty_batch(launch: Callable) -> None:
    args = (torch.zeros(0, 2, 3, 40), None, torch.zeros(0), 4)
    for tokens, probs in (slot_choices(*args), launch("slot_choices.slot_choices", *args)):
        assert tokens.shape == (0, 3, 8) and probs.shape == (0, 3, 8, 2)
