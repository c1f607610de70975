"""argmax_keys against torch.argmax, ties and odd values included; accept_chain against a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.greedy import (
    accept_chain,
    argmax_keys,
    key_tokens,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VOCABS = {"one-tile": 300, "eighteen-tiles": 36_000}
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("vocab", VOCABS.values(), ids=VOCABS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_keys_have_the_first_maximum_of_the_float32_copy(
    dtype: torch.dtype, vocab: int, launch: Callable
) -> None:
    """16 bits have ties at the top; rows are wider than the vocabulary, as padded heads are."""
    logits = (4 * torch.rand(5, vocab + 7) - 5).to(dtype)[:, :vocab]
    expected = logits.float().argmax(dim=-1)
    keys = launch("greedy.argmax_keys", logits)
    assert keys.dtype == torch.int64 and (keys.shape[1] > 1) == (vocab > 10_000)
    assert torch.equal(key_tokens(keys), expected)
    assert torch.equal(key_tokens(argmax_keys(logits)), expected)
    ties = (logits == logits.gather(1, expected[:, None])).sum(dim=1)
    assert dtype == torch.float32 or vocab < 10_000 or ties.max() > 1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_odd_rows(dtype: torch.dtype, launch: Callable) -> None:
    vocab = VOCABS["eighteen-tiles"]
    rows = {
        "all equal": {},
        "-0 before 0": {40: -0.0, 20_000: 0.0},
        "0 before -0": {40: 0.0, 20_000: -0.0},
        "a tie far apart": {17_000: 3.0, 33_000: 3.0},
        "the last column": {vocab - 1: 1.0},
        "NaN over inf": {5: INF, 30_000: NAN, 30_001: NAN},
        "negative": {100: -1.0, 30_000: -0.5},
        "masked but one": {33_333: -7.0},
    }
    logits = torch.full((len(rows) + 1, vocab), -2.0)
    logits[-2:] = -INF
    for row, cells in enumerate(rows.values()):
        for column, value in cells.items():
            logits[row, column] = value
    logits = logits.to(dtype)
    tokens = key_tokens(launch("greedy.argmax_keys", logits))
    assert tokens.tolist() == [0, 40, 40, 17_000, vocab - 1, 30_000, 30_000, 33_333, 0]
    assert torch.equal(tokens, logits.float().argmax(dim=-1))


def as_keys(tokens: torch.Tensor, splits: int) -> torch.Tensor:
    """Keys of ``splits`` splits, the tokens' own anywhere among them."""
    keys = torch.randint(-(2**62), 0, (*tokens.shape, splits))
    place = torch.randint(splits, tokens.shape)[..., None]
    return keys.scatter(-1, place, (5 << 32) + (2**31 - 1 - tokens)[..., None])


@pytest.mark.parametrize("splits", [0, 1, 5], ids=["tokens", "one-split", "five-splits"])
@pytest.mark.parametrize("width", [2, 8, 17])
def test_accept_chain_is_a_loop_over_drafts(width: int, splits: int, launch: Callable) -> None:
    size = 40
    block, tokens = torch.randint(2, (2, size, width)) + 151_000
    tokens[:4, : width - 1] = block[:4, 1:]  # all accepted
    lens = torch.randint(2**33, (size,))
    chosen = as_keys(tokens, splits) if splits else tokens
    results = accept_chain(block, chosen, lens)
    for row in range(size):
        kept = 0
        while kept < width - 1 and block[row, kept + 1] == tokens[row, kept]:
            kept += 1
        outcome = [x[row].item() for x in results[1:]]
        assert outcome == [kept, tokens[row, kept], kept + 1, lens[row] + kept + 1]
    assert torch.equal(results[0], tokens)
    assert results[1].max() == width - 1 and results[1].min() == 0
    for actual, reference in zip(
        launch("greedy.accept_chain", block, chosen, lens, []), results, strict=True
    ):
        assert actual.dtype == reference.dtype and torch.equal(actual, reference)


def test_the_next_steps_tables_are_written(launch_and_args: Callable) -> None:
    """Of the batch's rows, and of no others."""
    block, tokens = torch.randint(2, (2, 5, 4))
    tables = torch.full((2, 9), -1)
    rows = torch.tensor([8, 3, 0, 5, 6])
    args = block, tokens, torch.arange(5) + 100
    _, _, bonus, _, new_lens = accept_chain(*args, relay=[rows, *tables])
    expected = torch.full((2, 9), -1)
    expected[0, rows], expected[1, rows] = new_lens, bonus
    assert torch.equal(tables, expected)
    _, after = launch_and_args(
        "greedy.accept_chain", *args, [rows, *torch.full((2, 9), -1).unbind()]
    )
    assert torch.equal(torch.stack(list(after[3][1:])), expected)


@pytest.mark.parametrize("length", [1, 4])
def test_a_simulated_length_replaces_the_rule(length: int, launch: Callable) -> None:
    block, tokens = torch.randint(2, (2, 5, 4))
    lens = torch.arange(5) + 100
    results = accept_chain(block, tokens, lens, simulated=length)
    _, num_correct, bonus, commit_lens, new_lens = results
    assert num_correct.tolist() == [length - 1] * 5 and commit_lens.tolist() == [length] * 5
    assert torch.equal(bonus, tokens[:, length - 1]) and torch.equal(new_lens, lens + length)
    kernel = launch("greedy.accept_chain", block, tokens, lens, [], length)
    assert all(torch.equal(x, y) for x, y in zip(kernel, results, strict=True))


def test_nothing_to_accept(launch: Callable) -> None:
    none, lens = torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    assert launch("greedy.argmax_keys", torch.zeros(0, 9)).shape[0] == 0
    assert [len(x) for x in launch("greedy.accept_chain", none, none, lens, [])] == [0] * 5
