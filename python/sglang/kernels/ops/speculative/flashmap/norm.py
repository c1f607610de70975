"""RMSNorm, alone and followed by rotary positions.

The drafter's weights were trained with ``x * round(weight / rms(x))``: the scale is computed in
float32, rounded to ``x``'s dtype, and only then multiplied. The usual order, which rounds ``x /
rms(x)`` first, gives other values in half precision, so upstream's norms cannot stand in. Both
faces round at the same three places (scale, product, rotation); what is left between them is the
order of the sum of squares.
"""

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.rope import apply_rope_torch, load_rope
from sglang.srt.utils.custom_op import register_custom_op

_MAX_BLOCK_HEADS = 16


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of :func:`rms_norm`, for any number of leading dimensions."""
    inverse_rms = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)
    return x * (weight.float() * inverse_rms).to(x.dtype)


def rms_norm_rope_torch(
    x: torch.Tensor, weight: torch.Tensor, rope: torch.Tensor, eps: float
) -> torch.Tensor:
    """Reference of :func:`rms_norm_rope`."""
    return apply_rope_torch(rms_norm_torch(x, weight, eps), rope)


@triton.jit
def norm_rotate(
    x,
    weight,
    cos,
    sin,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rows ``x (ROWS, BLOCK_D)`` in float32, zero past ``D``, normed and rotated.

    ``cos`` and ``sin`` are ``(ROWS or 1, BLOCK_D / 2)``. Returns the even and the odd channels,
    each ``(ROWS, BLOCK_D / 2)``, rounded to ``DTYPE``.
    """
    inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    scale = (weight[None, :] * inverse_rms[:, None]).to(DTYPE).to(tl.float32)
    normed = (x * scale).to(DTYPE).to(tl.float32)
    even, odd = tl.split(tl.reshape(normed, (ROWS, BLOCK_D // 2, 2)))
    return (even * cos - odd * sin).to(DTYPE), (odd * cos + even * sin).to(DTYPE)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    dim,
    eps,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < dim
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    scale = (weight * tl.rsqrt(tl.sum(x * x, 0) / dim + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * dim + col, (x * scale).to(dtype), mask=mask)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launcher of :func:`rms_norm`."""
    rows, dim = x.shape
    assert x.stride(1) == 1 and weight.shape == (dim,) and weight.is_contiguous()
    out = _fake_rms_norm(x, weight, eps)
    if rows:
        block = triton.next_power_of_2(dim)
        _rms_norm_kernel[(rows,)](
            x,
            weight,
            out,
            x.stride(0),
            dim,
            eps,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
            **launch_options(x.device),
        )
    return out


def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rms_norm_op = register_custom_op(
    rms_norm_triton,
    op_name="flashmap_rms_norm",
    mutates_args=[],
    fake_impl=_fake_rms_norm,
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * round(weight * rsqrt(mean(x**2) + eps))`` over the rows of ``x (T, d)``.

    Args:
        x: float32, bfloat16 or float16; rows may be strided, channels are contiguous.
        weight: ``(d,)``, any float dtype; used in float32.
        eps: added to the mean square.

    Returns:
        ``(T, d)``, contiguous, in ``x``'s dtype.
    """
    return (_rms_norm_op if x.is_cuda else rms_norm_torch)(x, weight, eps)


@triton.jit
def _rms_norm_rope_kernel(
    x_ptr,
    weight_ptr,
    rope_ptr,
    out_ptr,
    x_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    mask = (head < HEADS)[:, None] & (d < D)[None, :]
    offset = head[:, None] * D + d[None, :]
    x = tl.load(x_ptr + token * x_stride + offset, mask=mask, other=0.0).to(tl.float32)
    row = token + tl.zeros((1,), tl.int64)
    cos, sin = load_rope(rope_ptr, row, row >= 0, D, 1, BLOCK_D)
    even, odd = norm_rotate(x, weight, cos, sin, eps, D, BLOCK_HEADS, BLOCK_D, dtype)
    out = tl.reshape(tl.join(even, odd), (BLOCK_HEADS, BLOCK_D))
    tl.store(out_ptr + token * (HEADS * D) + offset, out, mask=mask)


def rms_norm_rope_triton(
    x: torch.Tensor, weight: torch.Tensor, rope: torch.Tensor, eps: float
) -> torch.Tensor:
    """Launcher of :func:`rms_norm_rope`."""
    rows, heads, head_dim = x.shape
    assert x.stride(1) == head_dim and x.stride(2) == 1
    assert weight.shape == (head_dim,) and weight.is_contiguous()
    assert rope.shape == (rows, head_dim // 2, 2) and rope.dtype == torch.float32
    assert rope.is_contiguous()
    out = _fake_rms_norm_rope(x, weight, rope, eps)
    if rows:
        block_heads = min(triton.next_power_of_2(heads), _MAX_BLOCK_HEADS)
        _rms_norm_rope_kernel[(rows, triton.cdiv(heads, block_heads))](
            x,
            weight,
            rope,
            out,
            x.stride(0),
            eps,
            HEADS=heads,
            D=head_dim,
            BLOCK_HEADS=block_heads,
            BLOCK_D=triton.next_power_of_2(head_dim),
            **launch_options(x.device),
        )
    return out


def _fake_rms_norm_rope(
    x: torch.Tensor, weight: torch.Tensor, rope: torch.Tensor, eps: float
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rms_norm_rope_op = register_custom_op(
    rms_norm_rope_triton,
    op_name="flashmap_rms_norm_rope",
    mutates_args=[],
    fake_impl=_fake_rms_norm_rope,
)


def rms_norm_rope(
    x: torch.Tensor, weight: torch.Tensor, rope: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm over each head's channels, then rotary positions.

    Args:
        x: ``(T, heads, D)`` float32, bfloat16 or float16; tokens may be strided (a slice of a fused
            projection), heads and channels are contiguous.
        weight: ``(D,)``, any float dtype; used in float32.
        rope: ``(T, D / 2, 2)`` float32, of :func:`rope_table`.
        eps: added to the mean square.

    Returns:
        ``(T, heads, D)``, contiguous, in ``x``'s dtype.
    """
    return (_rms_norm_rope_op if x.is_cuda else rms_norm_rope_torch)(x, weight, rope, eps)
