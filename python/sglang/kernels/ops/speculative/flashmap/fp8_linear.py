"""Linear layer with e4m3 weights, one scale per output channel.

Few rows (``MAX_ROWS`` of :mod:`.skinny_linear`) leave ``x`` in 16 bits: their time is that of the
weights' bytes, which are halved. More rows are computed on FP8 tensor cores, for which ``x`` is
quantized too, with a scale per row (``torch._scaled_mm`` with row-wise scales; Ada, Hopper and
later). The torch reference emulates both: a float32 product of the values that the two sides are
rounded to.
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.skinny_linear import MAX_ROWS, skinny_linear
from sglang.srt.utils.custom_op import register_custom_op

E4M3_MAX = 448.0
# torch._scaled_mm takes reductions and channels in multiples of this.
_ALIGNMENT = 16


def can_quantize(weight: torch.Tensor) -> bool:
    """Whether ``weight (N, K)`` has a shape that FP8 tensor cores take."""
    return weight.shape[0] % _ALIGNMENT == 0 and weight.shape[1] % _ALIGNMENT == 0


def quantize_rows_torch(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Reference of :func:`quantize_rows`."""
    x = x.float()
    largest = x.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    return (x / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


@triton.jit
def _quantize_kernel(
    x_ptr, quantized_ptr, scale_ptr, stride, dim, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < dim
    x = tl.load(x_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    scale = tl.where(largest > 0, tl.div_rn(largest, 448.0), 1.0)
    quantized = tl.clamp(tl.div_rn(x, scale + tl.zeros_like(x)), -448.0, 448.0)
    out = quantized_ptr + row * dim + column
    tl.store(out, quantized.to(quantized_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale)


def quantize_rows_triton(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Launcher of :func:`quantize_rows`."""
    rows, dim = x.shape
    assert x.stride(1) == 1
    quantized, scale = _fake_quantize_rows(x)
    if rows:
        block = triton.next_power_of_2(dim)
        _quantize_kernel[(rows,)](
            x,
            quantized,
            scale,
            x.stride(0),
            dim,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
            **launch_options(x.device),
        )
    return quantized, scale


def _fake_quantize_rows(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    quantized = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return quantized, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


_quantize_rows_op = register_custom_op(
    quantize_rows_triton,
    op_name="flashmap_quantize_rows",
    mutates_args=[],
    fake_impl=_fake_quantize_rows,
)


def quantize_rows(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """``x (T, K)`` of any float dtype as the product of e4m3 ``(T, K)`` and float32 ``scale (T,)``.

    The largest magnitude of a row becomes 448, e4m3's own; weights are quantized by it too.
    """
    return (_quantize_rows_op if x.is_cuda else quantize_rows_torch)(x)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    row_scale: Optional[torch.Tensor] = None,
    activation: str = "none",
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """``act(row_scale · (x @ (scale · weight).T) + bias)``.

    Args:
        x: ``(T, K)`` bfloat16 or float16; rows may be strided.
        weight: ``(N, K)`` e4m3, contiguous; both multiples of 16.
        scale: ``(N,)`` float32.
        bias, row_scale, activation, out: as in :func:`skinny_linear`.

    Returns:
        ``(T, N)``, contiguous, in ``x``'s dtype.
    """
    if x.shape[0] <= MAX_ROWS:
        return skinny_linear(
            x, weight, bias, scale=scale, row_scale=row_scale, activation=activation, out=out
        )
    quantized, x_scale = quantize_rows(x)
    if row_scale is not None:
        x_scale = x_scale * row_scale
    if not x.is_cuda:
        return skinny_linear(
            quantized.to(x.dtype),
            weight,
            bias,
            scale=scale,
            row_scale=x_scale,
            activation=activation,
            out=out,
        )
    y = torch._scaled_mm(
        quantized,
        weight.T,
        scale_a=x_scale[:, None],
        scale_b=scale[None, :],
        bias=bias,
        out_dtype=x.dtype,
        out=out,
    )
    return torch.ops.aten.gelu.out(y, out=y) if activation == "gelu" else y
