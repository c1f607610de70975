"""Moves the KV of accepted tree nodes to the front of their verify windows, in one launch.

A tree's nodes wrote their keys and values into the ``W`` slots of their window in node order; the
next step expects the accepted path in its first slots. Depth ``d`` of a path is node ``path[d]``,
and never comes before it: ``path[d] >= d``, since parents have smaller indices. A node that is in
its place already is not touched, so a request whose path is a chain's costs no bytes.

A slot may be read for one depth and written for another. Within a program all reads come before a
barrier and all writes after it, and programs share no bytes: each has one tile of the rows of one
buffer and one request.

Pools keep one tensor a layer, so the kernel takes a table of their addresses, as ``context_kv.py``
does. Bytes: two rows a moved node and buffer.
"""

from __future__ import annotations

from typing import List

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.context_kv import address_table
from sglang.srt.utils.custom_op import register_custom_op

# 4-byte words of a row that one program moves.
_TILE_WORDS = 128


def move_accepted_torch(
    buffers: List[torch.Tensor], slots: torch.Tensor, path: torch.Tensor
) -> None:
    """Reference of :func:`move_accepted`."""
    moved = path > torch.arange(path.shape[1], device=path.device)
    request, depth = moved.nonzero(as_tuple=True)
    target = slots[request, depth].long()
    source = slots[request, path[request, depth].long()].long()
    for buffer in buffers:
        buffer[target] = buffer[source]


@triton.jit
def _move_accepted_kernel(
    addresses_ptr,
    slots_ptr,
    path_ptr,
    word_ptr,
    row_words,
    width,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(2).to(tl.int64)
    depth = tl.arange(0, BLOCK)
    node = tl.load(path_ptr + request * DEPTH + depth, mask=depth < DEPTH, other=-1)
    moved = node > depth
    if tl.sum(moved.to(tl.int32), 0) == 0:
        return
    window = slots_ptr + request * width
    target = tl.load(window + depth, mask=moved, other=0).to(tl.int64)
    source = tl.load(window + node, mask=moved, other=0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = moved[:, None] & (column < row_words)[None, :]
    # word_ptr only lends its pointer type.
    buffer = tl.load(addresses_ptr + tl.program_id(0)).to(word_ptr.dtype)
    words = tl.load(buffer + source[:, None] * row_words + column[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(buffer + target[:, None] * row_words + column[None, :], words, mask=mask)


def move_accepted_triton(
    buffers: List[torch.Tensor], slots: torch.Tensor, path: torch.Tensor
) -> None:
    """Launcher of :func:`move_accepted`."""
    batch, depth = path.shape
    assert slots.dim() == 2 and slots.shape[0] == batch and depth <= slots.shape[1]
    assert slots.is_contiguous() and path.is_contiguous()
    if batch == 0:
        return
    row_bytes = buffers[0].stride(0) * buffers[0].element_size()
    for buffer in buffers:
        assert buffer.is_contiguous(), "a KV pool's rows must follow each other"
        assert buffer.stride(0) * buffer.element_size() == row_bytes
    assert row_bytes % 4 == 0
    words = row_bytes // 4
    tile = min(_TILE_WORDS, triton.next_power_of_2(words))
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    _move_accepted_kernel[(len(buffers), triton.cdiv(words, tile), batch)](
        address_table(addresses, path.device),
        slots,
        path,
        buffers[0].view(torch.int32),
        words,
        slots.shape[1],
        DEPTH=depth,
        BLOCK=triton.next_power_of_2(depth),
        TILE=tile,
    )


def _fake_move_accepted(
    buffers: List[torch.Tensor], slots: torch.Tensor, path: torch.Tensor
) -> None:
    return None


_move_accepted_op = register_custom_op(
    move_accepted_triton,
    op_name="flashmap_move_accepted",
    mutates_args=["buffers"],
    fake_impl=_fake_move_accepted,
)


def move_accepted(buffers: List[torch.Tensor], slots: torch.Tensor, path: torch.Tensor) -> None:
    """Move the rows of accepted nodes to the first slots of their windows; no host sync.

    Args:
        buffers: KV buffers ``(pool slots, …)`` of any dtype, contiguous, of one row size, which is
            a multiple of 4 bytes.
        slots: ``(B, W)`` int64 or int32, the slot of each node; all differ.
        path: ``(B, D)`` int32, ``D <= W``: the node at each depth, ascending, the root first, -1
            after the end. Row ``slots[b, path[b, d]]`` goes to ``slots[b, d]``.
    """
    implementation = _move_accepted_op if path.is_cuda else move_accepted_torch
    implementation(buffers, slots, path)
