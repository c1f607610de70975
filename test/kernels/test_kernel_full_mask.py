"""write_full_mask: the layout that prefix-wide backends read, cell by cell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.full_mask import write_full_mask_torch

LENS = {
    "one": [5],
    "ragged": [0, 1, 700, 33],
    "longer-than-a-block": [2100],
    "many": list(range(70)),
}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=["bool", "uint8"])
@pytest.mark.parametrize("width", [2, 17], ids=lambda w: f"W{w}")
def test_layout(lens: list[int], width: int, dtype: torch.dtype, launch_and_args: Callable) -> None:
    mask = torch.rand(len(lens), width, width) < 0.5
    expected = []
    for b, prefix in enumerate(lens):
        for row in range(width):
            expected += [True] * prefix + mask[b, row].tolist()
    after = [True, False, True]  # past the layout nothing is written
    expected = torch.tensor(expected + after)
    start = torch.cat([~expected[: -len(after)], expected[-len(after) :]]).to(dtype)
    out = start.clone()
    write_full_mask_torch(mask, torch.tensor(lens), out)
    assert torch.equal(out.bool(), expected)
    _, args = launch_and_args("full_mask.write_full_mask", mask, torch.tensor(lens), start)
    assert torch.equal(args[2].bool(), expected)
