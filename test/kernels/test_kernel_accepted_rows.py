"""accepted_rows against indexing row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.accepted_rows import accepted_rows


@pytest.mark.parametrize("dim", [24, 5000], ids=["one-tile", "two-tiles"])
@pytest.mark.parametrize("width, depth", [(5, 5), (17, 9)], ids=["whole", "cut"])
def test_accepted_rows(width: int, depth: int, dim: int, launch: Callable) -> None:
    batch = 4
    # More rows and columns than are asked for, as a padded graph's output has.
    hidden = torch.randn(batch * width + 3, dim + 8).bfloat16()[:, :dim]
    slots, positions = torch.randperm(2 * batch * width).view(2, batch, width)
    path = torch.full((batch, depth), -1, dtype=torch.int32)
    for request, length in enumerate((1, 2, depth - 1, depth)):
        inner = torch.randperm(width - 1)[: length - 1].sort().values + 1
        path[request, :length] = torch.cat([torch.zeros(1), inner])
    args = hidden, path, slots, positions
    for rows, cut_slots, cut_positions in (
        accepted_rows(*args),
        launch("accepted_rows.accepted_rows", *args),
    ):
        rows = rows.view(batch, depth, dim)
        for request in range(batch):
            for d in range(depth):
                node = max(int(path[request, d]), 0)
                assert torch.equal(rows[request, d], hidden[request * width + node])
        for cut, whole in ((cut_slots, slots), (cut_positions, positions)):
            assert cut.is_contiguous() and torch.equal(cut, whole[:, :depth])


def test_an_empty_batch(launch: Callable) -> None:
    none = torch.zeros(0, 5, dtype=torch.int64)
    rows, *_ = launch("accepted_rows.accepted_rows", torch.zeros(0, 7), none.int(), none, none)
    assert rows.shape == (0, 7)
