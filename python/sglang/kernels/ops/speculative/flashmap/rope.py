"""Rotary positions on interleaved channel pairs.

``rope_table`` holds, for every row and pair ``i``, the cosine and sine of ``position * theta**(-2i
/ head_dim)``. The table is made once a draft step and every layer's queries and keys are rotated by
it: the pair ``(x[2i], x[2i+1])`` becomes ``(x[2i] cos - x[2i+1] sin, x[2i+1] cos + x[2i] sin)``, in
float32.

The reference evaluates the angle in float32 as the drafter's training code does. A float32 power
differs by an ulp or two between libraries, so the kernel takes it in float64 and rounds it once: it
sits within those ulps of any of them.
"""

import math

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op

_BLOCK_ROWS = 16


def rope_table_torch(positions: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Reference of :func:`rope_table`."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponents)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def apply_rope_torch(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """``x (T, heads, D)`` with its pairs rotated by ``rope (T, D / 2, 2)``, in its dtype."""
    cos, sin = rope[:, None].unbind(-1)
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


@triton.jit
def load_rope(table_ptr, row, mask, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """``cos, sin (ROWS, BLOCK_D / 2)`` of the table's rows ``row (ROWS,)``, 0 outside ``mask``."""
    d = tl.arange(0, BLOCK_D)
    mask = mask[:, None] & (d < D)[None, :]
    table = tl.load(table_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0)
    return tl.split(tl.reshape(table, (ROWS, BLOCK_D // 2, 2)))


@triton.jit
def rotary_angle(position, pair, LOG_THETA: tl.constexpr, D: tl.constexpr):
    """``position (ROWS,) · theta ** (-2 pair / D)`` for ``pair (PAIRS,)``: ``(ROWS, PAIRS)``."""
    exponent = ((2 * pair).to(tl.float32) / D).to(tl.float64)
    power = tl.exp(exponent * tl.full(exponent.shape, LOG_THETA, tl.float64)).to(tl.float32)
    return position.to(tl.float32)[:, None] * (1.0 / power)[None, :]


@triton.jit
def _rope_table_kernel(
    positions_ptr,
    table_ptr,
    rows,
    LOG_THETA: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    pair = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + row, mask=row < rows, other=0)
    angle = rotary_angle(position, pair, LOG_THETA, D)
    out = table_ptr + row[:, None] * D + 2 * pair[None, :]
    mask = (row < rows)[:, None] & (2 * pair < D)[None, :]
    tl.store(out, tl.cos(angle), mask=mask)
    tl.store(out + 1, tl.sin(angle), mask=mask)


def rope_table_triton(positions: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Launcher of :func:`rope_table`."""
    assert positions.ndim == 1 and positions.is_contiguous() and head_dim % 2 == 0
    rows = positions.shape[0]
    table = _fake_rope_table(positions, head_dim, theta)
    if rows:
        _rope_table_kernel[(triton.cdiv(rows, _BLOCK_ROWS),)](
            positions,
            table,
            rows,
            LOG_THETA=math.log(theta),
            D=head_dim,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_ROWS=_BLOCK_ROWS,
            **launch_options(positions.device),
        )
    return table


def _fake_rope_table(positions: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    shape = (positions.shape[0], head_dim // 2, 2)
    return torch.empty(shape, dtype=torch.float32, device=positions.device)


_rope_table_op = register_custom_op(
    rope_table_triton,
    op_name="flashmap_rope_table",
    mutates_args=[],
    fake_impl=_fake_rope_table,
)


def rope_table(positions: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """The rotary table ``(T, head_dim / 2, 2)`` of ``positions (T,)``, in float32.

    Args:
        positions: integer positions, int32 or int64, contiguous.
        head_dim: channels of a head, even.
        theta: the rotary base.

    Returns:
        ``[..., 0]`` the cosines, ``[..., 1]`` the sines of ``position * theta**(-2i / head_dim)``.
    """
    implementation = _rope_table_op if positions.is_cuda else rope_table_torch
    return implementation(positions, head_dim, theta)
