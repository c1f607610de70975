"""Fills the tables from which fa3 attends a tree: its prefix, and each node's path in the suffix.

fa3 has no tree mask. Upstream attends the committed prefix of a request and the window of its tree
apart, the window as one sequence per row whose page table of single tokens lists the slots that
the row sees, and merges the two. These tables are written into a CUDA graph's buffers before every
replay; upstream does so in 26 torch launches, one of which copies whole rows of
``req_to_token`` and one of which sorts, from a mask that has the prefix in every row.

Here one launch writes all of them from the ``(W, W)`` mask itself, a program per row. A row's table
lists the slots that it sees in order, then the others, as upstream's stable sort leaves them; so
both agree bit by bit, in rows that only pad a batch too (these see their whole window). fa3 reads
the prefix sums of lengths only where keys are passed along, which verify never does; they are kept
right all the same.

Bytes: ``W`` mask cells and ``4 W`` of slots in, ``4 W`` out for each of ``B W`` rows, 167 KB at
``B = 64, W = 17``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import List

import torch
import triton
import triton.language as tl
from sglang.srt.utils.custom_op import register_custom_op

_BLOCK = 256


@dataclass(frozen=True)
class SuffixTables:
    """Buffers for ``B`` requests, all int32 and contiguous."""

    prefix_lens: torch.Tensor
    """``(B,)``, committed tokens."""
    prefix_ends: torch.Tensor
    """``(B + 1,)``, prefix sums of ``prefix_lens``; the first is not written."""
    slots: torch.Tensor
    """``(B · W, W)``, of the window: first those that a row sees."""
    lens: torch.Tensor
    """``(B · W,)``, how many a row sees."""
    ends: torch.Tensor
    """``(B · W + 1,)``, prefix sums of ``lens``; the first is not written."""

    def tensors(self) -> list[torch.Tensor]:
        """The fields in order."""
        return [getattr(self, field.name) for field in fields(self)]


def write_tree_suffix_torch(
    mask: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    tables: List[torch.Tensor],
) -> None:
    """Reference of :func:`write_tree_suffix`; ``positions`` only repeat what the mask says."""
    out = SuffixTables(*tables)
    batch, (real, width, _) = len(seq_lens), mask.shape
    column = torch.arange(width, device=mask.device)
    window = req_to_token[rows[:, None], seq_lens[:, None] + column]
    padded = mask.new_ones(batch, width, width)
    padded[:real] = mask
    order = torch.where(padded, column, column + width).argsort(dim=-1)
    out.slots.copy_(window[:, None].expand(-1, width, -1).gather(2, order).flatten(0, 1))
    out.lens.copy_(padded.sum(dim=-1).flatten())
    out.ends[1:] = out.lens.cumsum(0)
    out.prefix_lens.copy_(seq_lens)
    out.prefix_ends[1:] = seq_lens.cumsum(0)


@triton.jit
def _tree_suffix_kernel(
    mask_ptr,
    positions_ptr,
    seq_lens_ptr,
    rows_ptr,
    req_to_token_ptr,
    req_to_token_stride,
    prefix_lens_ptr,
    prefix_ends_ptr,
    slots_ptr,
    lens_ptr,
    ends_ptr,
    real,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Programs: (request, row); requests from `real` on have no tree.
    request = tl.program_id(0)
    row = tl.program_id(1)
    node = request * WIDTH + row
    prefix = tl.load(seq_lens_ptr + request).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    is_seen = tl.load(
        mask_ptr + node.to(tl.int64) * WIDTH + column, mask=inside & (request < real), other=1
    )
    seen = ((is_seen != 0) & inside).to(tl.int32)
    unseen = ((is_seen == 0) & inside).to(tl.int32)
    length = tl.sum(seen, 0)
    place = tl.where(seen != 0, tl.cumsum(seen, 0), length + tl.cumsum(unseen, 0)) - 1
    window = req_to_token_ptr + tl.load(rows_ptr + request).to(tl.int64) * req_to_token_stride
    slot = tl.load(window + prefix + column, mask=inside)
    tl.store(slots_ptr + node.to(tl.int64) * WIDTH + place, slot, mask=inside)
    tl.store(lens_ptr + node, length)

    # A row sees the anchor's token and one more for each position after it.
    end = 0
    for first in range(0, node + 1, BLOCK):
        other = first + tl.arange(0, BLOCK)
        of_tree = (other <= node) & (other < real * WIDTH)
        position = tl.load(positions_ptr + other, mask=of_tree, other=0)
        start = tl.load(seq_lens_ptr + other // WIDTH, mask=of_tree, other=0)
        seen_there = tl.where(of_tree, (position - start + 1).to(tl.int32), WIDTH)
        end += tl.sum(tl.where(other <= node, seen_there, 0), 0)
    tl.store(ends_ptr + node + 1, end)

    if row == 0:
        tl.store(prefix_lens_ptr + request, prefix.to(tl.int32))
        prefix_end = 0
        for first in range(0, request + 1, BLOCK):
            other = first + tl.arange(0, BLOCK)
            start = tl.load(seq_lens_ptr + other, mask=other <= request, other=0)
            prefix_end += tl.sum(start.to(tl.int32), 0)
        tl.store(prefix_ends_ptr + request + 1, prefix_end)


def write_tree_suffix_triton(
    mask: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    tables: List[torch.Tensor],
) -> None:
    """Launcher of :func:`write_tree_suffix`."""
    batch, (real, width, _) = len(seq_lens), mask.shape
    out = SuffixTables(*tables)
    assert mask.shape == (real, width, width) and mask.dtype == torch.bool and real <= batch
    assert positions.shape == (real * width,) and rows.shape == (batch,)
    assert out.prefix_lens.shape == (batch,) and out.prefix_ends.shape == (batch + 1,)
    assert out.slots.shape == (batch * width, width) and out.lens.shape == (batch * width,)
    assert out.ends.shape == (batch * width + 1,)
    assert all(table.dtype == torch.int32 for table in (*tables, req_to_token))
    for tensor in (mask, positions, seq_lens, rows, *tables):
        assert tensor.is_contiguous()
    assert req_to_token.stride(1) == 1
    if batch == 0:
        return
    _tree_suffix_kernel[(batch, width)](
        mask.view(torch.uint8),
        positions,
        seq_lens,
        rows,
        req_to_token,
        req_to_token.stride(0),
        *tables,
        real,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        BLOCK=_BLOCK,
        num_warps=1,
    )


def _fake_write_tree_suffix(
    mask: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    tables: List[torch.Tensor],
) -> None:
    return None


_write_tree_suffix_op = register_custom_op(
    write_tree_suffix_triton,
    op_name="flashmap_write_tree_suffix",
    mutates_args=["tables"],
    fake_impl=_fake_write_tree_suffix,
)


def write_tree_suffix(
    mask: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    tables: SuffixTables,
) -> None:
    """Write ``tables`` of ``B`` requests, the first ``R <= B`` of which have a tree.

    Args:
        mask: ``(R, W, W)`` bool, true where a row attends a node.
        positions: ``(R · W,)`` integers, positions of the nodes.
        seq_lens: ``(B,)`` integers, committed tokens before the tree.
        rows: ``(B,)`` integers, rows of ``req_to_token``.
        req_to_token: ``(rows, context)`` int32 slots.
        tables: what is written, in place.
    """
    implementation = _write_tree_suffix_op if mask.is_cuda else write_tree_suffix_torch
    implementation(mask, positions, seq_lens, rows, req_to_token, tables.tensors())
