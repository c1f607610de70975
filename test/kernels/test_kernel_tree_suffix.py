"""write_tree_suffix: which slots each row of a tree sees, in fa3's tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.tree import plan_tree
from sglang.kernels.ops.speculative.flashmap.tree_suffix import (
    SuffixTables,
    write_tree_suffix_torch,
)

# lengths, requests with a tree, width
BATCHES = {
    "one": ([5], 1, 17),
    "ragged": ([3, 1, 70, 33], 4, 6),
    "padded": ([9, 40, 1, 1], 2, 6),
    "no-drafts-but-one": ([4, 3], 2, 2),
    "prefix-sums-of-two-blocks": ([8, 7, 6, 5, 1], 4, 60),
}


def tables(batch: int, width: int) -> list[torch.Tensor]:
    rows = batch * width
    shapes = (batch,), (batch + 1,), (rows, width), (rows,), (rows + 1,)
    return [torch.full(shape, -7, dtype=torch.int32) for shape in shapes]


@pytest.mark.parametrize("lens, real, width", BATCHES.values(), ids=BATCHES)
def test_tables(lens: list[int], real: int, width: int, launch_and_args: Callable) -> None:
    batch = len(lens)
    drafts = torch.randint(3, (real, 8, 6))
    tree = plan_tree(torch.zeros(real).long(), drafts, width, torch.arange(real) % 3 == 2)
    seq_lens, rows = torch.tensor(lens), torch.randperm(batch + 2)[:batch]
    req_to_token = torch.randperm((batch + 2) * 128).view(-1, 128).int()
    positions = (seq_lens[:real, None] + tree.depths).view(-1)

    slots, counts = [], []
    for b in range(batch):
        window = req_to_token[rows[b], lens[b] : lens[b] + width].tolist()
        for row in range(width):
            sees = tree.mask[b, row].tolist() if b < real else [True] * width
            counts.append(sum(sees))
            slots.append([s for s, see in zip(window, sees) if see])
            slots[-1] += [s for s, see in zip(window, sees) if not see]
    expected = SuffixTables(
        prefix_lens=torch.tensor(lens),
        prefix_ends=torch.tensor([-7, *torch.tensor(lens).cumsum(0)]),
        slots=torch.tensor(slots),
        lens=torch.tensor(counts),
        ends=torch.tensor([-7, *torch.tensor(counts).cumsum(0)]),
    ).tensors()
    inputs = tree.mask, positions, seq_lens, rows, req_to_token
    reference = tables(batch, width)
    write_tree_suffix_torch(*inputs, reference)
    _, args = launch_and_args("tree_suffix.write_tree_suffix", *inputs, tables(batch, width))
    for wanted, of_torch, of_triton in zip(expected, reference, args[-1]):
        assert torch.equal(of_torch.long(), wanted) and torch.equal(of_triton, of_torch)
