"""Uniform and normal draws keyed by (seed, offset): no state, no buffers.

The bits are Philox-4x32-10 in the drafter's layout (``philox.py``), so a request's numbers are the
same alone or in a batch, on every rank, eager or in a CUDA graph. ``uniform_noise`` takes the upper
23 bits of a word as the middle of one of 2^23 intervals of (0, 1): exact in float32, where one more
bit would round the last middle to 1. ``gaussian_noise`` turns each quad's two pairs of uniforms
into normals by Box-Muller (1958). The torch reference and the kernel give the same uniforms bit for
bit, and normals that differ by the float32 rounding of log, sqrt, cos and sin.
``normed_noise`` draws rows of normals for a product that an RMSNorm is folded into.
"""

import math
from typing import Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.philox import philox_torch, philox_words
from sglang.srt.utils.custom_op import register_custom_op

_BLOCK_QUADS = 256


def _quads(width: int, device: torch.device) -> torch.Tensor:
    return torch.arange((width + 3) // 4, device=device, dtype=torch.int64)


def _units_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, quads: torch.Tensor, stream: int
) -> torch.Tensor:
    """Float32 ``(R, n, 4)`` in (0, 1) of ``quads (n,)`` or ``(R, n)``."""
    words = philox_torch(seeds[:, None], offsets[:, None], quads, stream)
    return ((words >> 9).float() + 0.5) * (1.0 / (1 << 23))


def uniform_noise_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """Reference of :func:`uniform_noise`."""
    units = _units_torch(seeds, offsets, _quads(width, seeds.device), stream)
    return units.flatten(1)[:, :width].contiguous()


def gaussian_noise_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """Reference of :func:`gaussian_noise`."""
    quads = _quads(width, seeds.device)
    u0, u1, u2, u3 = _units_torch(seeds, offsets, quads, stream).unbind(-1)
    r0, r1 = (-2.0 * u0.log()).sqrt(), (-2.0 * u2.log()).sqrt()
    a0, a1 = u1 * (2.0 * math.pi), u3 * (2.0 * math.pi)
    normals = (r0 * a0.cos(), r0 * a0.sin(), r1 * a1.cos(), r1 * a1.sin())
    return torch.stack(normals, dim=-1).flatten(1)[:, :width].contiguous()


@triton.jit
def _unit(word):
    return ((word.to(tl.uint32, bitcast=True) >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)


@triton.jit
def _normal_pair(first, second):
    """Two normals of two words, by Box-Muller."""
    two_pi: tl.constexpr = 6.283185307179586
    radius, angle = tl.sqrt(-2.0 * tl.log(_unit(first))), _unit(second) * two_pi
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _noise_kernel(
    seeds_ptr,
    offsets_ptr,
    out_ptr,
    width,
    stream,
    GAUSSIAN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    quad = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + row)
    offset = tl.load(offsets_ptr + row)
    b0, b1, b2, b3 = philox_words(seed, offset, quad, stream)
    if GAUSSIAN:
        v0, v1 = _normal_pair(b0, b1)
        v2, v3 = _normal_pair(b2, b3)
    else:
        v0, v1, v2, v3 = _unit(b0), _unit(b1), _unit(b2), _unit(b3)
    column = 4 * quad
    out = out_ptr + row * width + column
    tl.store(out, v0, mask=column < width)
    tl.store(out + 1, v1, mask=column + 1 < width)
    tl.store(out + 2, v2, mask=column + 2 < width)
    tl.store(out + 3, v3, mask=column + 3 < width)


def _noise_triton(seeds, offsets, width: int, stream: int, gaussian: bool) -> torch.Tensor:
    assert seeds.is_contiguous() and offsets.is_contiguous()
    assert seeds.dtype == offsets.dtype == torch.int64
    out = torch.empty(seeds.shape[0], width, dtype=torch.float32, device=seeds.device)
    if out.numel() == 0:
        return out
    grid = (seeds.shape[0], triton.cdiv((width + 3) // 4, _BLOCK_QUADS))
    _noise_kernel[grid](
        seeds,
        offsets,
        out,
        width,
        stream,
        GAUSSIAN=gaussian,
        BLOCK=_BLOCK_QUADS,
        **launch_options(seeds.device),
    )
    return out


def uniform_noise_triton(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """:func:`uniform_noise` by the Triton kernel."""
    return _noise_triton(seeds, offsets, width, stream, gaussian=False)


def gaussian_noise_triton(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """:func:`gaussian_noise` by the Triton kernel."""
    return _noise_triton(seeds, offsets, width, stream, gaussian=True)


def _noise_fake(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    return seeds.new_empty(seeds.shape[0], width, dtype=torch.float32)


@register_custom_op(op_name="flashmap_uniform_noise", fake_impl=_noise_fake)
def _uniform_noise_op(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    return uniform_noise_triton(seeds, offsets, width, stream)


@register_custom_op(op_name="flashmap_gaussian_noise", fake_impl=_noise_fake)
def _gaussian_noise_op(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    return gaussian_noise_triton(seeds, offsets, width, stream)


def uniform_noise(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """Uniform draws in (0, 1): int64 ``seeds, offsets (R,)`` -> float32 ``(R, width)``."""
    op = _uniform_noise_op if seeds.is_cuda else uniform_noise_torch
    return op(seeds, offsets, width, stream)


def gaussian_noise(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """Standard normal draws: int64 ``seeds, offsets (R,)`` -> float32 ``(R, width)``."""
    op = _gaussian_noise_op if seeds.is_cuda else gaussian_noise_torch
    return op(seeds, offsets, width, stream)


def gaussian_at_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, columns: torch.Tensor, stream: int
) -> torch.Tensor:
    """Reference of :func:`gaussian_at`."""
    units = _units_torch(seeds, offsets, columns >> 2, stream)
    pair = (columns & 2)[..., None]
    radius, angle = units.gather(-1, torch.cat([pair, pair + 1], dim=-1)).unbind(-1)
    angle = angle * (2.0 * math.pi)
    return (-2.0 * radius.log()).sqrt() * torch.where(columns & 1 == 0, angle.cos(), angle.sin())


@triton.jit
def _gaussian_at_kernel(
    seeds_ptr,
    offsets_ptr,
    columns_ptr,
    out_ptr,
    width,
    stream,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(columns_ptr + row * width + i, mask=i < width, other=0).to(tl.int32)
    seed = tl.load(seeds_ptr + row)
    offset = tl.load(offsets_ptr + row)
    b0, b1, b2, b3 = philox_words(seed, offset, column >> 2, stream)
    second = (column & 2) != 0
    radius = _unit(tl.where(second, b2, b0))
    angle = _unit(tl.where(second, b3, b1)) * 6.283185307179586
    normal = tl.where((column & 1) == 0, tl.cos(angle), tl.sin(angle))
    tl.store(out_ptr + row * width + i, tl.sqrt(-2.0 * tl.log(radius)) * normal, mask=i < width)


def gaussian_at_triton(
    seeds: torch.Tensor, offsets: torch.Tensor, columns: torch.Tensor, stream: int
) -> torch.Tensor:
    """Launcher of :func:`gaussian_at`."""
    rows, width = columns.shape
    assert seeds.is_contiguous() and offsets.is_contiguous() and columns.is_contiguous()
    assert seeds.dtype == offsets.dtype == columns.dtype == torch.int64
    out = _gaussian_at_fake(seeds, offsets, columns, stream)
    if out.numel():
        _gaussian_at_kernel[(rows, triton.cdiv(width, _BLOCK_QUADS))](
            seeds,
            offsets,
            columns,
            out,
            width,
            stream,
            BLOCK=_BLOCK_QUADS,
            **launch_options(seeds.device),
        )
    return out


def _gaussian_at_fake(
    seeds: torch.Tensor, offsets: torch.Tensor, columns: torch.Tensor, stream: int
) -> torch.Tensor:
    return torch.empty(columns.shape, dtype=torch.float32, device=columns.device)


_gaussian_at_op = register_custom_op(
    gaussian_at_triton,
    op_name="flashmap_gaussian_at",
    mutates_args=[],
    fake_impl=_gaussian_at_fake,
)


def gaussian_at(
    seeds: torch.Tensor, offsets: torch.Tensor, columns: torch.Tensor, stream: int
) -> torch.Tensor:
    """Some columns of :func:`gaussian_noise`, without the others.

    Args:
        seeds, offsets: ``(R,)`` int64.
        columns: ``(R, n)`` int64, at least 0, contiguous.
        stream: as there.

    Returns:
        ``(R, n)`` float32: ``gaussian_noise(seeds, offsets, width, stream)`` at ``columns``.
    """
    op = _gaussian_at_op if seeds.is_cuda else gaussian_at_torch
    return op(seeds, offsets, columns, stream)


def norm_factor(
    noise: torch.Tensor, variances: torch.Tensor, gate: torch.Tensor, offset: float
) -> torch.Tensor:
    """``gate · rsqrt(Σ variances · noise² + offset)`` of rows ``noise (R, width)``: ``(R,)``."""
    return gate * torch.rsqrt((noise.square() * variances).sum(dim=1) + offset)


def normed_noise_torch(
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    variances: torch.Tensor,
    gate: torch.Tensor,
    offset: float,
    dtype: torch.dtype,
    stream: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Reference of :func:`normed_noise`."""
    noise = gaussian_noise_torch(seeds, offsets, variances.shape[0], stream)
    return noise.to(dtype), norm_factor(noise, variances, gate, offset)


@triton.jit
def _normed_noise_kernel(
    seeds_ptr,
    offsets_ptr,
    variances_ptr,
    gate_ptr,
    noise_ptr,
    factor_ptr,
    width,
    offset,
    stream,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    quad = tl.arange(0, BLOCK // 4)
    column = tl.arange(0, BLOCK)
    mask = column < width
    variances = tl.load(variances_ptr + column, mask=mask, other=0.0)
    gate = tl.load(gate_ptr)
    wait_for_inputs(DEPENDENT)
    seed = tl.load(seeds_ptr + row)
    b0, b1, b2, b3 = philox_words(seed, tl.load(offsets_ptr + row), quad, stream)
    z0, z1 = _normal_pair(b0, b1)
    z2, z3 = _normal_pair(b2, b3)
    z = tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), (BLOCK,))
    total = tl.sum(z * z * variances, 0) + offset
    tl.store(factor_ptr + row, gate * tl.rsqrt(total))
    tl.store(noise_ptr + row * width + column, z.to(noise_ptr.dtype.element_ty), mask=mask)


def normed_noise_triton(
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    variances: torch.Tensor,
    gate: torch.Tensor,
    offset: float,
    dtype: torch.dtype,
    stream: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Launcher of :func:`normed_noise`."""
    assert seeds.is_contiguous() and offsets.is_contiguous() and variances.is_contiguous()
    assert seeds.dtype == offsets.dtype == torch.int64
    assert variances.dtype == gate.dtype == torch.float32
    noise, factor = _normed_noise_fake(seeds, offsets, variances, gate, offset, dtype, stream)
    if seeds.shape[0]:
        block = max(triton.next_power_of_2(variances.shape[0]), 4)
        _normed_noise_kernel[(seeds.shape[0],)](
            seeds,
            offsets,
            variances,
            gate,
            noise,
            factor,
            variances.shape[0],
            offset,
            stream,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 16),
            **launch_options(seeds.device),
        )
    return noise, factor


def _normed_noise_fake(
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    variances: torch.Tensor,
    gate: torch.Tensor,
    offset: float,
    dtype: torch.dtype,
    stream: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    rows, width = seeds.shape[0], variances.shape[0]
    return seeds.new_empty(rows, width, dtype=dtype), seeds.new_empty(rows, dtype=torch.float32)


_normed_noise_op = register_custom_op(
    normed_noise_triton,
    op_name="flashmap_normed_noise",
    mutates_args=[],
    fake_impl=_normed_noise_fake,
)


def normed_noise(
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    variances: torch.Tensor,
    gate: torch.Tensor,
    offset: float,
    dtype: torch.dtype,
    stream: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """:func:`gaussian_noise` rounded to ``dtype``, and the factor of each row that norms it.

    Args:
        seeds, offsets: ``(R,)`` int64.
        variances: ``(width,)`` float32, weight of each square.
        gate: ``(1,)`` float32.
        offset: added to the sum of squares.
        dtype: of the noise returned; its squares are summed before they are rounded.
        stream: as there.

    Returns:
        ``noise (R, width)`` in ``dtype``, and ``gate · rsqrt(Σ variances · noise² + offset)``,
        ``(R,)`` float32.
    """
    op = _normed_noise_op if seeds.is_cuda else normed_noise_torch
    return op(seeds, offsets, variances, gate, offset, dtype, stream)


__all__ = [
    "gaussian_at",
    "gaussian_at_torch",
    "gaussian_at_triton",
    "gaussian_noise",
    "gaussian_noise_torch",
    "gaussian_noise_triton",
    "norm_factor",
    "normed_noise",
    "normed_noise_torch",
    "normed_noise_triton",
    "uniform_noise",
    "uniform_noise_torch",
    "uniform_noise_triton",
]
