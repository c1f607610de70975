"""Linear layer of a few rows: ``act(r s x Wᵀ + b)``, paced by how fast the weights arrive.

One draft block is 16 rows, so a draft's matrix products read their weights once and do next to
nothing with them. Library kernels are made for tiles of 64 rows and more and leave most of the GPU
idle between short products. Here:

1. The weights are the left operand of the dot product, so that a tile is ``BLOCK_N`` weight rows by
   all of the ``≤ 64`` rows of ``x``: every weight is read by one program only.
2. ``WARPS_K`` lets the warps of a program share the reduction (a batched dot product) where few
   weight rows are left to share; ``SPLITS`` lets programs share it. Programs leave float32 partial
   tiles; the one that arrives last adds them in a fixed order, so results are reproducible, and
   puts the counter back to 0 for the next launch.
3. Programmatic dependent launch (sm_90): where a program's weights are few (``WHOLE``) it has them
   in shared memory before it waits for the kernel that makes ``x``. Others start with both: asking
   the L2 cache for their weights before the wait took longer (472 us a draft against 432 on an
   H200), since what the kernel in front still reads then queues behind it.
4. Bias, factors, residual and moments are loaded before the product, so that its end waits for
   nothing: a load that misses costs a microsecond, and a draft has fifty products in a row.

Rounding follows the eager operations: sums, factors and bias in float32, rounded to ``x``'s dtype,
then GELU (erf) in float32, rounded again. Weights of 8 bits (e4m3, a scale per output channel) are
converted to ``x``'s dtype, which is exact, on their way to the dot product: they save bytes, and
``x`` is not quantized.
"""

from __future__ import annotations

import functools
from typing import List, NamedTuple, Optional

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.device import shared_bytes, sm_count
from sglang.kernels.ops.speculative.flashmap.launch import (
    current_lane,
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.widen import widen
from sglang.srt.utils.custom_op import register_custom_op

MAX_ROWS = 64
ACTIVATIONS = ("none", "gelu")
# tl.dot's smallest tile side.
_MIN_TILE = 16
_MAX_SPLITS = 8
# Reductions of which a program keeps its 16 weight rows in shared memory.
_WHOLE = (512, 1024, 2048)
# Elements of partial tiles and number of arrival counters that a launch may use.
_MAX_PARTIAL, _MAX_TILES = 1 << 20, 1024


class Tiles(NamedTuple):
    """Tile sizes and launch options of the kernel."""

    block_n: int
    block_k: int
    splits: int
    warps_k: int
    num_warps: int
    num_stages: int
    whole: int = 0
    """1: a program loads all of its weights before it waits; ``splits`` shares of ``block_k`` are
    the whole reduction."""


def default_tiles(
    rows: int,
    out_features: int,
    in_features: int,
    sms: int,
    shared: int = 227 << 10,
    moments: bool = False,
    weight_bytes: int = 2,
) -> Tiles:
    """Found on an H200 in the draft of Qwen3-8B (``benchmark/flashmap/draft_tiles.py``).

    ``shared``: bytes of shared memory that a program may take (99 kB on Ada); ``moments``: tiles of
    ``moments_block_n`` output features; ``weight_bytes``: of an element of the weights.
    """
    ample = shared >= 200 << 10
    if rows <= 16:
        if out_features > 16 * sms and not moments:
            if weight_bytes == 1 and out_features <= 64 * sms and shared >= 120 << 10:
                # One program an SM, with more warps to convert with; two narrow ones where tiles
                # of 64 rows would leave many SMs idle.
                if 8 * out_features >= 7 * 64 * sms:
                    return Tiles(64, 256, 1, 1, num_warps=8, num_stages=4)
                return Tiles(32, 512, 1, 4, num_warps=4, num_stages=3)
            # wgmma's tile of 64 weight rows. Fewer stages let two programs share an SM: slower.
            return Tiles(64, 128, 1, 1, num_warps=4, num_stages=6 if shared >= 120 << 10 else 4)
        if ample and in_features in _WHOLE and not moments:
            return Tiles(16, in_features, 1, 4, num_warps=4, num_stages=1, whole=1)
        deep = 5 if in_features > 2048 else 4
        return Tiles(16, 512, 1, 4, num_warps=4, num_stages=deep if ample else 3)
    block_n = 64
    tiles = triton.cdiv(out_features, block_n)
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * tiles <= sms and in_features >= 1024 * splits:
        splits *= 2
    # A stage holds 64 rows of both sides, 32 kB in 16 bits.
    return Tiles(block_n, 128, splits, 1, num_warps=4, num_stages=4 if shared >= 128 << 10 else 3)


def skinny_linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
    activation: str,
    out: torch.Tensor,
) -> None:
    """Reference of :func:`skinny_linear`: the library's product, written to ``out`` at once."""
    if scale is None and row_scale is None:
        if bias is None:
            torch.mm(x, weight.T, out=out)
        else:
            torch.addmm(bias, x, weight.T, out=out)
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        _scale_into(out, x.to(wide) @ weight.to(wide).T, bias, scale, row_scale)
    if activation == "gelu":
        torch.ops.aten.gelu.out(out, out=out)


def _scale_into(
    out: torch.Tensor,
    y: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
) -> None:
    """``out = row_scale · scale · y + bias``, rounded once."""
    for factor in (scale, None if row_scale is None else row_scale[:, None]):
        y = y if factor is None else y * factor
    out.copy_(y if bias is None else y + bias)


@triton.jit
def _join_moments(means, squares, mask, K, eps, PARTS: tl.constexpr):
    """Mean and ``1 / sqrt(variance + eps)`` of rows from those of ``PARTS`` equal parts."""
    mean = tl.sum(means, 1) / PARTS
    apart = tl.where(mask, means - mean[:, None], 0.0)
    # Chan's sum of squares: those inside the parts and those of the parts' means.
    total = tl.sum(squares + apart * apart * (K / PARTS), 1)
    return mean, tl.rsqrt(total / K + eps)


@triton.jit
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    row_scale_ptr,
    residual_ptr,
    gate_ptr,
    moments_ptr,
    column_sums_ptr,
    out_ptr,
    moments_out_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    x_stride,
    weight_stride,
    N,
    K,
    share,
    eps,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_MOMENTS_OUT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    GELU: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    WARPS_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Programs: (tile of output features, split of the reduction).
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    PART: tl.constexpr = BLOCK_K // WARPS_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, N - 1)
    m = tl.minimum(tl.arange(0, BLOCK_M), rows - 1)
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, K)
    # What the epilogue reads is asked for before the product, or each would wait for it at its end:
    # while the kernel in front still runs, but what that one makes: `x`, its factors and moments.
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n_read)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + n_read)
    if PARTS > 0:
        column_sums = tl.load(column_sums_ptr + n_read)
    if HAS_RESIDUAL:
        gate = tl.load(gate_ptr + n_read)
        residual = tl.load(residual_ptr + m[None, :] * N + n_read[:, None])
    if WHOLE:
        # Four parts, as their dot products are; each warp reads lines of its own share.
        QUARTER: tl.constexpr = BLOCK_K // 4
        WIDTH: tl.constexpr = QUARTER // WARPS_K
        k = first + tl.arange(0, WARPS_K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        w_at = weight_ptr + n_read.to(tl.int64)[None, :, None] * weight_stride + k[:, None, :]
        w0 = tl.load(w_at, eviction_policy="evict_first")
        w1 = tl.load(w_at + QUARTER, eviction_policy="evict_first")
        w2 = tl.load(w_at + 2 * QUARTER, eviction_policy="evict_first")
        w3 = tl.load(w_at + 3 * QUARTER, eviction_policy="evict_first")
    wait_for_inputs(DEPENDENT)
    if PARTS > 0:
        part_mask = (tl.arange(0, BLOCK_PARTS) < PARTS)[None, :]
        entry = moments_ptr + m[:, None] * PARTS + tl.arange(0, BLOCK_PARTS)[None, :]
        means = tl.load(entry, mask=part_mask, other=0.0)
        squares = tl.load(entry + rows * PARTS, mask=part_mask, other=0.0)
    if HAS_ROW_SCALE:
        row_scale = tl.load(row_scale_ptr + m)
    if WHOLE:
        x_at = x_ptr + m[None, None, :] * x_stride + k[:, :, None]
        x0 = tl.load(x_at)
        x1 = tl.load(x_at + QUARTER)
        x2 = tl.load(x_at + 2 * QUARTER)
        x3 = tl.load(x_at + 3 * QUARTER)
        parts = tl.zeros((WARPS_K, BLOCK_N, BLOCK_M), tl.float32)
        parts = tl.dot(widen(w0, dtype), x0, acc=parts, input_precision="ieee")
        parts = tl.dot(widen(w1, dtype), x1, acc=parts, input_precision="ieee")
        parts = tl.dot(widen(w2, dtype), x2, acc=parts, input_precision="ieee")
        parts = tl.dot(widen(w3, dtype), x3, acc=parts, input_precision="ieee")
        acc = tl.sum(parts, 0)
    elif WARPS_K == 1:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        weight_row = weight_ptr + n_read.to(tl.int64)[:, None] * weight_stride
        for start in tl.range(first, end, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            if EVEN_K:
                w = tl.load(weight_row + k[None, :], eviction_policy="evict_first")
                x = tl.load(x_ptr + m[None, :] * x_stride + k[:, None])
            else:
                w = tl.load(weight_row + k[None, :], mask=(k < end)[None, :], other=0.0)
                x = tl.load(
                    x_ptr + m[None, :] * x_stride + k[:, None], mask=(k < end)[:, None], other=0.0
                )
            acc = tl.dot(widen(w, dtype), x, acc=acc, input_precision="ieee")
    else:
        part = tl.arange(0, WARPS_K)
        parts = tl.zeros((WARPS_K, BLOCK_N, BLOCK_M), tl.float32)
        weight_row = weight_ptr + n_read.to(tl.int64)[None, :, None] * weight_stride
        for start in tl.range(first, end, BLOCK_K):
            k = start + part[:, None] * PART + tl.arange(0, PART)[None, :]
            if EVEN_K:
                w = tl.load(weight_row + k[:, None, :], eviction_policy="evict_first")
                x = tl.load(x_ptr + m[None, None, :] * x_stride + k[:, :, None])
            else:
                w = tl.load(weight_row + k[:, None, :], mask=(k < end)[:, None, :], other=0.0)
                x = tl.load(
                    x_ptr + m[None, None, :] * x_stride + k[:, :, None],
                    mask=(k < end)[:, :, None],
                    other=0.0,
                )
            parts = tl.dot(widen(w, dtype), x, acc=parts, input_precision="ieee")
        acc = tl.sum(parts, 0)

    if SPLITS > 1:
        tile = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        partial = partial_ptr + tl.program_id(0) * (SPLITS * BLOCK_N * BLOCK_M) + tile
        tl.store(partial + tl.program_id(1) * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # all of the tile is stored before it counts as arrived
        arrived = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived != SPLITS - 1:
            return
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in tl.static_range(SPLITS):
            acc += tl.load(partial + split * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        tl.store(arrived_ptr + tl.program_id(0), 0)
    if HAS_SCALE:
        acc *= scale[:, None]
    if PARTS > 0:
        mean, inverse_std = _join_moments(means, squares, part_mask, K, eps, PARTS)
        acc = (acc - column_sums[:, None] * mean[None, :]) * inverse_std[None, :]
    if HAS_ROW_SCALE:
        acc *= row_scale[None, :]
    if HAS_BIAS:
        acc += bias.to(tl.float32)[:, None]
    y = acc.to(dtype)
    if GELU:
        y = y.to(tl.float32)
        y = (0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))).to(dtype)
    row = tl.arange(0, BLOCK_M)
    mask = (n < N)[:, None] & (row < rows)[None, :]
    if HAS_RESIDUAL:
        y = (gate.to(tl.float32)[:, None] * y.to(tl.float32)).to(dtype).to(tl.float32)
        y = (residual.to(tl.float32) + y).to(dtype)
    tl.store(out_ptr + row[None, :] * N + n[:, None], y, mask=mask)
    if HAS_MOMENTS_OUT:
        # Every tile is whole: N is a multiple of BLOCK_N.
        y = y.to(tl.float32)
        tile_mean = tl.sum(y, 0) / BLOCK_N
        centered = y - tile_mean[None, :]
        moments = moments_out_ptr + row * tl.num_programs(0) + tl.program_id(0)
        tl.store(moments, tile_mean, mask=row < rows)
        squares = tl.sum(centered * centered, 0)
        tl.store(moments + rows * tl.num_programs(0), squares, mask=row < rows)


@functools.cache
def _scratch(device: torch.device, lane: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial tiles and arrival counters, shared by all launches of a lane (``launch.lane``).

    A launch leaves the counters at 0. Never freed, because captured graphs keep using them; call
    the op once before capturing it.
    """
    partial = torch.empty(_MAX_PARTIAL, dtype=torch.float32, device=device)
    return partial, torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def scratch_bytes(device: torch.device) -> int:
    """Of the buffers that launches on ``device`` share, in the two lanes of a draft."""
    return sum(buffer.nbytes for lane in (0, 1) for buffer in _scratch(device, lane))


class Extras(NamedTuple):
    """What a launch does besides the product, see ``residual_linear.py``; None: nothing."""

    residual: Optional[torch.Tensor] = None
    """``(T, N)`` contiguous, with ``gate (N,)``: the result is ``residual + gate · y``."""
    gate: Optional[torch.Tensor] = None
    moments_out: Optional[torch.Tensor] = None
    """``(2, T, parts)`` float32, of the result in parts of ``moments_block_n`` columns."""
    moments: Optional[torch.Tensor] = None
    """``(2, T, parts)`` float32, of ``x``: its rows are normed, with ``column_sums (N,)``."""
    column_sums: Optional[torch.Tensor] = None
    eps: float = 0.0


_NO_EXTRAS = Extras()


def moments_block_n(rows: int) -> int:
    """Output features of a tile that leaves moments; does not depend on the device."""
    return 16 if rows <= 16 else 64


def launch_skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
    activation: str,
    out: torch.Tensor,
    tiles: Optional[List[int]] = None,
    extras: Extras = _NO_EXTRAS,
) -> None:
    """Launch the kernel; ``tiles`` overrides the fields of :class:`Tiles`."""
    rows, in_features = x.shape
    out_features = weight.shape[0]
    assert rows <= MAX_ROWS, f"at most {MAX_ROWS} rows, got {rows}"
    assert weight.shape == (out_features, in_features)
    assert weight.dtype == x.dtype or (scale is not None and weight.dtype == torch.float8_e4m3fn)
    assert x.stride(1) == 1 and weight.stride(1) == 1
    residual, gate, moments_out, moments, column_sums, eps = extras
    for vector, size in (
        (bias, out_features),
        (scale, out_features),
        (row_scale, rows),
        (gate, out_features),
        (column_sums, out_features),
    ):
        assert vector is None or (vector.shape == (size,) and vector.is_contiguous())
    assert activation in ACTIVATIONS
    assert out.shape == (rows, out_features) and out.is_contiguous() and out.dtype == x.dtype
    assert residual is None or (residual.shape == out.shape and residual.is_contiguous())
    assert (residual is None) == (gate is None) and (moments is None) == (column_sums is None)
    if rows == 0:
        return
    t = (
        default_tiles(
            rows,
            out_features,
            in_features,
            sm_count(x.device),
            shared_bytes(x.device),
            moments_out is not None,
            weight.element_size(),
        )
        if tiles is None
        else Tiles(*tiles)
    )
    if moments_out is not None:
        t = t._replace(block_n=moments_block_n(rows))
    partial, arrived = _scratch(x.device, current_lane())
    block_m = max(triton.next_power_of_2(rows), _MIN_TILE)
    programs = triton.cdiv(out_features, t.block_n)
    if t.splits > 1:
        needed = programs * t.splits * t.block_n * block_m
        assert programs <= _MAX_TILES and needed <= _MAX_PARTIAL, t
    parts = 0
    if moments is not None:
        parts = moments.shape[2]
        assert moments.shape == (2, rows, parts) and moments.is_contiguous()
    if moments_out is not None:
        assert out_features % t.block_n == 0 and moments_out.is_contiguous()
        assert moments_out.shape == (2, rows, programs), moments_out.shape
    assert not t.whole or (t.warps_k > 1 and t.block_k * t.splits == in_features), t
    share = triton.cdiv(triton.cdiv(in_features, t.block_k), t.splits) * t.block_k
    _skinny_kernel[(programs, t.splits)](
        x,
        weight,
        bias if bias is not None else x,
        scale if scale is not None else x,
        row_scale if row_scale is not None else x,
        residual if residual is not None else x,
        gate if gate is not None else x,
        moments if moments is not None else x,
        column_sums if column_sums is not None else x,
        out,
        moments_out if moments_out is not None else out,
        partial,
        arrived,
        rows,
        x.stride(0),
        weight.stride(0),
        out_features,
        in_features,
        share,
        eps,
        EVEN_K=in_features % t.block_k == 0,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        HAS_ROW_SCALE=row_scale is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_MOMENTS_OUT=moments_out is not None,
        PARTS=parts,
        BLOCK_PARTS=triton.next_power_of_2(max(parts, 1)),
        GELU=activation == "gelu",
        SPLITS=t.splits,
        WHOLE=bool(t.whole),
        WARPS_K=t.warps_k,
        BLOCK_M=block_m,
        BLOCK_N=t.block_n,
        BLOCK_K=t.block_k,
        num_warps=t.num_warps,
        num_stages=t.num_stages,
        **launch_options(x.device),
    )


def skinny_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
    activation: str,
    out: torch.Tensor,
    tiles: Optional[List[int]] = None,
) -> None:
    """Launcher of :func:`skinny_linear`; ``tiles`` overrides the fields of :class:`Tiles`."""
    launch_skinny(x, weight, bias, scale, row_scale, activation, out, tiles)


def _fake_skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
    activation: str,
    out: torch.Tensor,
    tiles: Optional[List[int]] = None,
) -> None:
    return None


_skinny_linear_op = register_custom_op(
    skinny_linear_triton,
    op_name="flashmap_skinny_linear",
    mutates_args=["out"],
    fake_impl=_fake_skinny_linear,
)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    scale: Optional[torch.Tensor] = None,
    row_scale: Optional[torch.Tensor] = None,
    activation: str = "none",
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """``act(row_scale · scale · (x @ weight.T) + bias)``.

    A kernel of ours for at most 64 rows of 16 bits on a GPU; the library for other sizes.

    Args:
        x: ``(T, K)``; rows may be strided, channels are contiguous.
        weight: ``(N, K)`` in ``x``'s dtype, or float8_e4m3fn with ``scale``; likewise. On a CPU
            also one in oneDNN's layout (``layers/packed_linear.py``), without factors.
        bias: ``(N,)`` in ``x``'s dtype, or None.
        scale: ``(N,)`` float32 factor of each output channel, or None.
        row_scale: ``(T,)`` float32 factor of each row, or None.
        activation: ``"none"`` or ``"gelu"`` (erf).
        out: ``(T, N)`` contiguous, in ``x``'s dtype, to write the result to.

    Returns:
        ``(T, N)``, contiguous, in ``x``'s dtype.
    """
    if weight.is_mkldnn:
        assert scale is None and row_scale is None
        y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        y = torch.nn.functional.gelu(y) if activation == "gelu" else y
        return y if out is None else out.copy_(y)
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    half = x.is_cuda and x.element_size() == 2
    if half and 0 < x.shape[0] <= MAX_ROWS:
        _skinny_linear_op(x, weight, bias, scale, row_scale, activation, out)
    elif half and weight.dtype == x.dtype:
        half_linear(x, weight, bias, scale, row_scale, activation, out)
    else:
        skinny_linear_torch(x, weight, bias, scale, row_scale, activation, out)
    return out


def half_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
    activation: str,
    out: torch.Tensor,
) -> None:
    """``skinny_linear`` of 16 bits by the library, its product in 16 bits too.

    Factors are applied to the rounded product: in float32 throughout, the product of 256 rows
    alone took 92 us of a step, and another 30 to widen the weights.
    """
    if scale is None and row_scale is None:
        skinny_linear_torch(x, weight, bias, None, None, activation, out)
        return
    torch.mm(x, weight.T, out=out)
    _scale_into(out, out.float(), bias, scale, row_scale)
    if activation == "gelu":
        torch.ops.aten.gelu.out(out, out=out)
