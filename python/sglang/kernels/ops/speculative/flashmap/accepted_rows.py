"""Brings the accepted rows of verify windows to the front, of all that becomes draft context.

Along a tree's path the target's hidden states are rows of nodes, while the slots and positions they
go to are the window's first. One launch copies the rows and cuts the windows to the path's depth;
the KV of the same nodes is moved by ``accepted_kv.py``. After the end of a path there is the
anchor's row again, which is not committed. Bytes: two rows for each depth of each request.
"""

from __future__ import annotations

from typing import Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op

_TILE = 4096


def accepted_rows_torch(
    hidden: torch.Tensor, path: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of :func:`accepted_rows`."""
    batch, width = slots.shape
    first = torch.arange(0, batch * width, width, device=path.device)
    rows = (path.clamp_min(0) + first[:, None]).view(-1)
    depth = path.shape[1]
    cut = slots[:, :depth].contiguous(), positions[:, :depth].contiguous()
    return hidden.index_select(0, rows), *cut


@triton.jit
def _accepted_rows_kernel(
    hidden_ptr,
    path_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    cut_slots_ptr,
    cut_positions_ptr,
    stride,
    dim,
    width,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    cell = tl.program_id(0).to(tl.int64)
    request, depth = cell // DEPTH, cell % DEPTH
    row = request * width + tl.maximum(tl.load(path_ptr + cell), 0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    values = tl.load(hidden_ptr + row * stride + column, mask=column < dim)
    tl.store(rows_ptr + cell * dim + column, values, mask=column < dim)
    if tl.program_id(1) == 0:
        tl.store(cut_slots_ptr + cell, tl.load(slots_ptr + request * width + depth))
        tl.store(cut_positions_ptr + cell, tl.load(positions_ptr + request * width + depth))


def accepted_rows_triton(
    hidden: torch.Tensor, path: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launcher of :func:`accepted_rows`."""
    (batch, width), (_, depth) = slots.shape, path.shape
    assert positions.shape == (batch, width) and len(hidden) >= batch * width >= batch * depth
    assert hidden.stride(1) == 1 and path.dtype == torch.int32
    assert path.is_contiguous() and slots.is_contiguous() and positions.is_contiguous()
    outputs = _fake_accepted_rows(hidden, path, slots, positions)
    if batch:
        dim = hidden.shape[1]
        _accepted_rows_kernel[(batch * depth, triton.cdiv(dim, _TILE))](
            hidden,
            path,
            slots,
            positions,
            *outputs,
            hidden.stride(0),
            dim,
            width,
            DEPTH=depth,
            TILE=_TILE,
            **launch_options(hidden.device),
        )
    return outputs


def _fake_accepted_rows(
    hidden: torch.Tensor, path: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = hidden.new_empty((path.numel(), hidden.shape[1]))
    return rows, slots.new_empty(path.shape), positions.new_empty(path.shape)


_accepted_rows_op = register_custom_op(
    accepted_rows_triton,
    op_name="flashmap_accepted_rows",
    mutates_args=[],
    fake_impl=_fake_accepted_rows,
)


def accepted_rows(
    hidden: torch.Tensor, path: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is committed of verify windows, in path order.

    Args:
        hidden: ``(≥ B · W, H)``, any dtype, columns contiguous: a row a node.
        path: ``(B, D)`` int32, ``D <= W``: the node at each depth, -1 after the end.
        slots, positions: ``(B, W)`` integers of the windows, contiguous.

    Returns:
        ``hidden`` of the path's nodes ``(B · D, H)``, after its end the row of node 0 again; the
        first ``D`` of ``slots`` and of ``positions``, ``(B, D)`` each.
    """
    implementation = _accepted_rows_op if hidden.is_cuda else accepted_rows_torch
    return implementation(hidden, path, slots, positions)
