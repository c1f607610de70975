"""stage_inputs: what a graph's buffers hold after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.stage_inputs import stage_inputs


def make(size: int) -> list[torch.Tensor]:
    return [
        *torch.randint(2**40, (3, size)),
        torch.rand(size),
        torch.ones(size, dtype=torch.int32),
        torch.rand(size, 3),
        torch.rand(size) < 0.5,
    ]


@pytest.mark.parametrize("size, captured", [(1, 1), (3, 8), (70, 130)], ids=lambda n: str(n))
def test_stage_inputs(size: int, captured: int, launch_and_args: Callable) -> None:
    inputs, stale = make(size), make(captured)
    buffers = [buffer.clone() for buffer in stale]
    stage_inputs(inputs, buffers)
    kernel = launch_and_args(
        "stage_inputs.stage_inputs", inputs, [buffer.clone() for buffer in stale]
    )[1][1]
    for index, (value, old) in enumerate(zip(inputs, stale, strict=True)):
        expected = torch.cat([value, old[size:]])
        if index == 4:  # active
            expected[size:] = 0
        assert torch.equal(buffers[index], expected)
        assert torch.equal(kernel[index], expected)
