"""What each row of a draft is: its position, rotation, random numbers and sampling parameters.

A draft of ``B`` requests with ``N`` candidate blocks of ``K`` slots has ``B N K`` rows, ``b N K + c
K + k`` for slot ``k`` of candidate ``c``. All that its kernels read a row by follows from a few
numbers of the request; in eager operations that is two dozen launches of a microsecond or two in
front of the network, here one.

Candidate 0 is drafted at its request's draft temperature and filters, so that it is the same for
every ``N``; the others at ``candidate_temperature``. With more than one candidate a request at
temperature 0 has no filters: its top-k of 1 would make all of them one.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.rope import rope_table_torch, rotary_angle
from sglang.srt.utils.custom_op import register_custom_op

# Rows one anchor may draw for: N · K stays below it.
ROWS_PER_ANCHOR = 1 << 14


class DraftRows(NamedTuple):
    """``R = B N K`` rows, and the ``B`` anchors they follow."""

    positions: torch.Tensor
    """``(R,)`` int64."""
    rope: torch.Tensor
    """``(R, D / 2, 2)`` float32, as of ``rope_table``."""
    seeds: torch.Tensor
    """``(R,)`` int64."""
    offsets: torch.Tensor
    """``(R,)`` int64: rows of one anchor position have ``ROWS_PER_ANCHOR`` of their own."""
    temperatures: torch.Tensor
    """``(R,)`` float32."""
    filters: torch.Tensor
    """Top-k, top-p and min-p, ``(R, 3)`` float32, 0 for none."""
    lens: torch.Tensor
    """Context rows with the anchor's, ``(B,)`` int32; 0 for inactive requests."""
    anchor_slots: torch.Tensor
    """Pool slots of the anchors' positions, ``(B,)`` int64."""
    anchor_rope: torch.Tensor
    """``(B, D / 2, 2)`` float32."""


def draft_rows_torch(
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    filters: torch.Tensor,
    active: torch.Tensor,
    seed_table: torch.Tensor,
    req_to_token: torch.Tensor,
    candidates: int,
    slots: int,
    candidate_temperature: float,
    head_dim: int,
    theta: float,
) -> DraftRows:
    """Reference of :func:`draft_rows`."""
    per_request = candidates * slots
    steps = torch.arange(1, slots + 1, device=rows.device).repeat(candidates)
    positions = (seq_lens[:, None] + steps).view(-1)
    index = torch.arange(per_request, device=rows.device)
    heat = temperatures[:, None].repeat(1, candidates)
    heat[:, 1:] = candidate_temperature
    if candidates > 1:
        filters = filters * (temperatures > 0)[:, None]
    return DraftRows(
        positions=positions,
        rope=rope_table_torch(positions, head_dim, theta),
        seeds=seed_table[rows].repeat_interleave(per_request),
        offsets=(seq_lens[:, None] * ROWS_PER_ANCHOR + index).view(-1),
        temperatures=heat.view(-1).repeat_interleave(slots),
        filters=filters.repeat_interleave(per_request, dim=0),
        lens=((seq_lens + 1) * active).to(torch.int32),
        anchor_slots=req_to_token[rows, seq_lens].to(torch.int64),
        anchor_rope=rope_table_torch(seq_lens, head_dim, theta),
    )


@triton.jit
def _draft_rows_kernel(
    seq_lens_ptr,
    rows_ptr,
    temperatures_ptr,
    filters_ptr,
    active_ptr,
    seed_table_ptr,
    req_to_token_ptr,
    positions_out,
    rope_out,
    seeds_out,
    offsets_out,
    temperatures_out,
    filters_out,
    lens_out,
    anchor_slots_out,
    anchor_rope_out,
    table_stride,
    candidate_temperature,
    CANDIDATES: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS_PER_ANCHOR: tl.constexpr,
    LOG_THETA: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    # Programs: candidate blocks. Slot -1 of a tile is the anchor, written by candidate 0.
    b = (tl.program_id(0) // CANDIDATES).to(tl.int64)
    candidate = tl.program_id(0) % CANDIDATES
    seq_len = tl.load(seq_lens_ptr + b)
    row = tl.load(rows_ptr + b)
    temperature = tl.load(temperatures_ptr + b)
    slot = tl.arange(0, BLOCK_SLOTS) - 1
    in_block = (slot >= 0) & (slot < SLOTS)
    out = tl.program_id(0).to(tl.int64) * SLOTS + slot
    position = seq_len + 1 + slot
    tl.store(positions_out + out, position, mask=in_block)
    seed = tl.load(seed_table_ptr + row)
    tl.store(seeds_out + out, seed + tl.zeros_like(out), mask=in_block)
    offset = seq_len * ROWS_PER_ANCHOR + candidate * SLOTS + slot
    tl.store(offsets_out + out, offset, mask=in_block)
    heat = tl.where(candidate > 0, candidate_temperature, temperature)
    tl.store(temperatures_out + out, heat + tl.zeros_like(out).to(tl.float32), mask=in_block)
    kind = tl.arange(0, 4)
    value = tl.load(filters_ptr + b * 3 + kind, mask=kind < 3, other=0.0)
    if CANDIDATES > 1:
        value = tl.where(temperature > 0, value, 0.0)
    tl.store(
        filters_out + out[:, None] * 3 + kind[None, :],
        value[None, :] + tl.zeros((BLOCK_SLOTS, 4), tl.float32),
        mask=in_block[:, None] & (kind < 3)[None, :],
    )

    pair = tl.arange(0, BLOCK_HALF)
    angle = rotary_angle(position, pair, LOG_THETA, D)
    cos, sin = tl.cos(angle), tl.sin(angle)
    in_half = (2 * pair < D)[None, :]
    entry = rope_out + out[:, None] * D + 2 * pair[None, :]
    tl.store(entry, cos, mask=in_block[:, None] & in_half)
    tl.store(entry + 1, sin, mask=in_block[:, None] & in_half)
    if candidate == 0:
        is_anchor = (slot == -1)[:, None] & in_half
        entry = anchor_rope_out + b * D + 2 * pair[None, :] + 0 * slot[:, None]
        tl.store(entry, cos, mask=is_anchor)
        tl.store(entry + 1, sin, mask=is_anchor)
        length = (seq_len + 1) * tl.load(active_ptr + b)
        tl.store(lens_out + b, length.to(tl.int32))
        pool_slot = tl.load(req_to_token_ptr + row * table_stride + seq_len)
        tl.store(anchor_slots_out + b, pool_slot.to(tl.int64))


def _empty(requests: int, candidates: int, slots: int, head_dim: int, device) -> DraftRows:
    total = requests * candidates * slots

    def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DraftRows(
        positions=make(total, dtype=torch.int64),
        rope=make(total, head_dim // 2, 2, dtype=torch.float32),
        seeds=make(total, dtype=torch.int64),
        offsets=make(total, dtype=torch.int64),
        temperatures=make(total, dtype=torch.float32),
        filters=make(total, 3, dtype=torch.float32),
        lens=make(requests, dtype=torch.int32),
        anchor_slots=make(requests, dtype=torch.int64),
        anchor_rope=make(requests, head_dim // 2, 2, dtype=torch.float32),
    )


def draft_rows_triton(
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    filters: torch.Tensor,
    active: torch.Tensor,
    seed_table: torch.Tensor,
    req_to_token: torch.Tensor,
    candidates: int,
    slots: int,
    candidate_temperature: float,
    head_dim: int,
    theta: float,
) -> DraftRows:
    """Launcher of :func:`draft_rows`."""
    requests = seq_lens.shape[0]
    for tensor, dtype in (
        (seq_lens, torch.int64),
        (rows, torch.int64),
        (temperatures, torch.float32),
        (active, torch.int32),
    ):
        assert tensor.shape == (requests,) and tensor.is_contiguous() and tensor.dtype == dtype
    assert filters.shape == (requests, 3) and filters.is_contiguous()
    assert filters.dtype == torch.float32 and seed_table.dtype == torch.int64
    assert req_to_token.dtype == torch.int32 and req_to_token.stride(1) == 1
    assert candidates * slots <= ROWS_PER_ANCHOR and head_dim % 2 == 0
    result = _empty(requests, candidates, slots, head_dim, seq_lens.device)
    if requests:
        _draft_rows_kernel[(requests * candidates,)](
            seq_lens,
            rows,
            temperatures,
            filters,
            active,
            seed_table,
            req_to_token,
            *result,
            req_to_token.stride(0),
            candidate_temperature,
            CANDIDATES=candidates,
            SLOTS=slots,
            ROWS_PER_ANCHOR=ROWS_PER_ANCHOR,
            LOG_THETA=math.log(theta),
            D=head_dim,
            BLOCK_SLOTS=triton.next_power_of_2(slots + 1),
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            **launch_options(seq_lens.device),
        )
    return result


_Tensors = Tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]


def _fake_draft_rows(
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    filters: torch.Tensor,
    active: torch.Tensor,
    seed_table: torch.Tensor,
    req_to_token: torch.Tensor,
    candidates: int,
    slots: int,
    candidate_temperature: float,
    head_dim: int,
    theta: float,
) -> _Tensors:
    return tuple(_empty(seq_lens.shape[0], candidates, slots, head_dim, seq_lens.device))


@register_custom_op(op_name="flashmap_draft_rows", mutates_args=[], fake_impl=_fake_draft_rows)
def _draft_rows_op(
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    filters: torch.Tensor,
    active: torch.Tensor,
    seed_table: torch.Tensor,
    req_to_token: torch.Tensor,
    candidates: int,
    slots: int,
    candidate_temperature: float,
    head_dim: int,
    theta: float,
) -> _Tensors:
    return tuple(
        draft_rows_triton(
            seq_lens,
            rows,
            temperatures,
            filters,
            active,
            seed_table,
            req_to_token,
            candidates,
            slots,
            candidate_temperature,
            head_dim,
            theta,
        )
    )


def draft_rows(
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    filters: torch.Tensor,
    active: torch.Tensor,
    seed_table: torch.Tensor,
    req_to_token: torch.Tensor,
    candidates: int,
    slots: int,
    candidate_temperature: float,
    head_dim: int,
    theta: float,
) -> DraftRows:
    """The rows of a draft, see :class:`DraftRows`.

    Args:
        seq_lens: ``(B,)`` int64, committed positions before the anchor (= the anchor's position).
        rows: ``(B,)`` int64, each request's row of ``seed_table`` and ``req_to_token``.
        temperatures: ``(B,)`` float32.
        filters: ``(B, 3)`` float32.
        active: ``(B,)`` int32, 1, or 0 for graph padding.
        seed_table: ``(rows,)`` int64.
        req_to_token: ``(rows, context)`` int32.
        candidates: ``N``; slots: ``K``.
        candidate_temperature: of candidates 1 and up.
        head_dim: ``D``; theta: the rotary base.
    """
    implementation = _draft_rows_op if seq_lens.is_cuda else draft_rows_torch
    return DraftRows(
        *implementation(
            seq_lens,
            rows,
            temperatures,
            filters,
            active,
            seed_table,
            req_to_token,
            candidates,
            slots,
            candidate_temperature,
            head_dim,
            theta,
        )
    )
