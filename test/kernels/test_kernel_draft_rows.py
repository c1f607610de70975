"""draft_rows: reference against loops in Python, kernel against reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.draft_rows import (
    ROWS_PER_ANCHOR,
    DraftRows,
    draft_rows,
)

HEAT, THETA = 0.5, 10_000.0
SEQ_LENS, ROWS = [7, 130_000, 1, 40], [3, 0, 4, 3]
TEMPERATURES, ACTIVE = [0.0, 1.0, 0.7, 0.2], [1, 1, 1, 0]


def arguments(candidates: int, slots: int, head_dim: int) -> tuple:
    return (
        torch.tensor(SEQ_LENS),
        torch.tensor(ROWS),
        torch.tensor(TEMPERATURES),
        torch.tensor([[1.0, 0.5, 0.1], [0, 0.9, 0], [20, 0, 0], [0, 0, 0.2]]),
        torch.tensor(ACTIVE, dtype=torch.int32),
        torch.tensor([5, -1, 2**40, -(2**62), 17]),
        torch.randint(1 << 30, (5, 130_001), dtype=torch.int32),
        candidates,
        slots,
        HEAT,
        head_dim,
        THETA,
    )


@pytest.mark.parametrize(
    "candidates, slots, head_dim", [(1, 16, 64), (3, 5, 96), (2, 64, 128)], ids=lambda n: str(n)
)
def test_draft_rows(candidates: int, slots: int, head_dim: int, launch: Callable) -> None:
    args = arguments(candidates, slots, head_dim)
    filters, seeds, table = args[3], args[5], args[6]
    got = draft_rows(*args)
    row = 0
    for b, (length, place, heat) in enumerate(zip(SEQ_LENS, ROWS, TEMPERATURES, strict=True)):
        assert got.lens[b] == (length + 1) * ACTIVE[b]
        assert got.anchor_slots[b] == table[place, length]
        for candidate in range(candidates):
            for slot in range(slots):
                assert got.positions[row] == length + 1 + slot
                assert got.seeds[row] == seeds[place]
                drawn = candidate * slots + slot
                assert got.offsets[row] == length * ROWS_PER_ANCHOR + drawn
                assert got.temperatures[row] == torch.tensor(HEAT if candidate else heat)
                kept = candidates == 1 or heat > 0
                assert torch.equal(got.filters[row], filters[b] * kept)
                row += 1
    assert len(got.positions) == row
    pairs = THETA ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    for positions, rope in ((got.positions, got.rope), (args[0], got.anchor_rope)):
        angle = positions.double()[:, None] * pairs
        exact = torch.stack((angle.cos(), angle.sin()), dim=-1)
        # An angle of 130k radians is off by half an ulp of float32, and by its factor's.
        near = positions < 1000
        torch.testing.assert_close(rope[near].double(), exact[near], rtol=0, atol=1e-4)
        assert rope.square().sum(-1).sub(1).abs().max() < 1e-5

    kernel = DraftRows(*launch("draft_rows.draft_rows", *args))
    for name, value in got._asdict().items():
        if name.endswith("rope"):
            ulp = 2.0**-23 * 130_065
            assert (getattr(kernel, name) - value).abs().max() < 2 * math.pi * ulp
        else:
            assert torch.equal(getattr(kernel, name), value), name


def test_no_requests(launch: Callable) -> None:
    args = list(arguments(2, 4, 64))
    args[:5] = [value[:0] for value in args[:5]]
    for value in launch("draft_rows.draft_rows", *args):
        assert value.shape[0] == 0
