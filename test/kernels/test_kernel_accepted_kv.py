"""move_accepted: rows of accepted paths against a move one request and one depth after the
other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.accepted_kv import move_accepted_torch

BUFFERS = 3


def paths(kind: str, batch: int, width: int, depth: int) -> torch.Tensor:
    """Ascending nodes from 0 on, -1 after the end."""
    path = torch.full((batch, depth), -1, dtype=torch.int32)
    for b in range(batch):
        length = int(torch.randint(1, depth + 1, ()))
        if kind == "in-place":
            nodes = torch.arange(length)
        elif kind == "one-on":  # each row is read for one depth and written for the next
            nodes = torch.arange(length) + (torch.arange(length) > 0)
        else:
            rest = torch.randperm(width - 1)[: length - 1] + 1
            nodes = torch.cat([torch.zeros(1, dtype=torch.int64), rest.sort().values])
        path[b, : len(nodes)] = nodes
    return path


@pytest.mark.parametrize(
    "width, depth", [(17, 17), (9, 5), (40, 6), (18, 17)], ids=["W17", "W9", "W40", "W18"]
)
@pytest.mark.parametrize("kind", ["random", "one-on", "in-place"])
@pytest.mark.parametrize(
    "row, dtype",
    [((2, 8), torch.float32), ((3, 100), torch.bfloat16), ((4, 128), torch.float8_e4m3fn)],
    ids=["64B", "600B", "fp8"],
)
def test_move(
    row: tuple[int, int],
    dtype: torch.dtype,
    kind: str,
    width: int,
    depth: int,
    launch_and_args: Callable,
) -> None:
    batch = 3
    path = paths(kind, batch, width - (kind == "one-on"), min(depth, width - (kind == "one-on")))
    slots = torch.randperm(batch * width + 5)[: batch * width].view(batch, width)
    before = [torch.randn(batch * width + 5, *row).to(dtype) for _ in range(BUFFERS)]
    expected = [buffer.clone() for buffer in before]
    for buffer, old in zip(expected, before):
        for b in range(batch):
            for d, node in enumerate(path[b].tolist()):
                if node >= 0:
                    buffer[slots[b, d]] = old[slots[b, node]]
    reference = [buffer.clone() for buffer in before]
    move_accepted_torch(reference, slots, path)
    _, args = launch_and_args("accepted_kv.move_accepted", before, slots, path)
    for want, refer, kernel in zip(expected, reference, args[0]):
        assert torch.equal(refer.float(), want.float())
        assert torch.equal(kernel.float(), want.float())
    if kind == "in-place":
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(expected, before))


def test_no_request(launch_and_args: Callable) -> None:
    buffers, slots = [torch.ones(4, 8)], torch.zeros(0, 3, dtype=torch.int64)
    path = torch.zeros(0, 2, dtype=torch.int32)
    move_accepted_torch(buffers, slots, path)
    launch_and_args("accepted_kv.move_accepted", buffers, slots, path)
