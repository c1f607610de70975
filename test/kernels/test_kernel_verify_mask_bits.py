"""pack_verify_mask: reference and kernel against bits set one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.attention.verify_mask_bits import pack_verify_mask, words_a_row

OP = "sglang.kernels.ops.attention.verify_mask_bits.pack_verify_mask"


def bits_one_by_one(mask: torch.Tensor) -> list[list[list[int]]]:
    rows = []
    for request in mask.tolist():
        rows.append([])
        for row in request:
            union = sum(1 << j for j, seen in enumerate(row) if seen)
            words = [union >> (64 * i) & (2**64 - 1) for i in range(words_a_row(len(row)))]
            rows[-1].append([word - 2**64 if word >> 63 else word for word in words])
    return rows


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=["bool", "bytes"])
@pytest.mark.parametrize("length", [1, 17, 64, 65, 129])
def test_bits_are_the_masks_cells(
    length: int, dtype: torch.dtype, launch_and_args: Callable
) -> None:
    mask = torch.rand(3, length, length) < 0.5
    mask[0] = True
    # Upstream's buffers are flat and longer than a batch.
    flat = torch.cat((mask.flatten(), torch.ones(7, dtype=torch.bool))).to(dtype)
    words = torch.full((3, length, words_a_row(length)), 5)
    pack_verify_mask(flat, words)
    assert words.tolist() == bits_one_by_one(mask)
    again = launch_and_args(OP, flat, torch.full_like(words, 5))[1][1]
    assert torch.equal(again, words)


def test_no_requests(launch_and_args: Callable) -> None:
    empty = torch.zeros(0, dtype=torch.bool)
    words = torch.zeros(0, 17, 1, dtype=torch.int64)
    assert launch_and_args(OP, empty, words)[1][1].shape == (0, 17, 1)
