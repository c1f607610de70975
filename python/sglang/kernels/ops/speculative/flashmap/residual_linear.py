"""Linear layers that write to a residual stream and read its LayerNorm, without a kernel between.

A DiT's branch ends in ``x + g · (a Wᵀ + b)`` and the next begins with ``LN(x) Uᵀ + c``. With the
modulation of its AdaLN folded into ``U`` and ``c`` (``srt/speculative/flashmap/projection.py``),

    LN(x) Uᵀ + c = (x Uᵀ − mean(x) · (U 1)) / sqrt(var(x) + eps) + c,

so that the product reads ``x`` as it is and the norm is a factor and a term of each row, known
before the product ends. :func:`add_linear` adds in its epilogue and leaves each tile's mean and sum
of centered squares beside ``x``; :func:`normed_linear` joins them (Chan et al. 1979) while its
weights are on their way. A draft of one block thereby loses a launch a branch.

Rounding: ``x`` is rounded as in :mod:`.adaln`. ``LN(x)`` is not rounded at all, where AdaLN's three
steps are; in return ``U`` is rounded with its modulation in it. The difference of the first two
terms cancels as far as ``|mean(x)|`` exceeds the standard deviation, in float32.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from sglang.kernels.ops.speculative.flashmap.skinny_linear import (
    MAX_ROWS,
    Extras,
    launch_skinny,
    moments_block_n,
    skinny_linear_torch,
)
from sglang.srt.utils.custom_op import register_custom_op


def can_fuse(x: torch.Tensor, dim: int) -> bool:
    """Whether a stream ``(T, dim)`` of rows like ``x``'s is served by the kernel."""
    rows = x.shape[0]
    skinny = x.is_cuda and 0 < rows <= MAX_ROWS and x.element_size() == 2
    return skinny and dim % moments_block_n(rows) == 0


def add_linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    gate: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Reference of :func:`add_linear`."""
    y = x.new_empty((x.shape[0], weight.shape[0]))
    skinny_linear_torch(x, weight, bias, scale, row_scale, "none", y)
    if residual is not None:
        y = residual + gate * y
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    mean = wide.mean(dim=1)
    squares = (wide - mean[:, None]).square().sum(dim=1)
    return y, torch.stack((mean, squares))[..., None]


def add_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    gate: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Launcher of :func:`add_linear`."""
    out, moments = _fake_add_linear(x, weight, bias, scale, row_scale, residual, gate)
    extras = Extras(residual=residual, gate=gate, moments_out=moments)
    launch_skinny(x, weight, bias, scale, row_scale, "none", out, extras=extras)
    return out, moments


def _fake_add_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    row_scale: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    gate: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    rows, dim = x.shape[0], weight.shape[0]
    parts = dim // moments_block_n(rows)
    return x.new_empty((rows, dim)), x.new_empty((2, rows, parts), dtype=torch.float32)


_add_linear_op = register_custom_op(
    add_linear_triton,
    op_name="flashmap_add_linear",
    mutates_args=[],
    fake_impl=_fake_add_linear,
)


def add_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    *,
    scale: Optional[torch.Tensor] = None,
    row_scale: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
    gate: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """``residual + gate · (row_scale · scale · (x @ weight.T) + bias)`` and its rows' moments.

    Args:
        x, weight, bias, scale, row_scale: as in ``skinny_linear``; on a GPU rows as ``can_fuse``
            has them.
        residual: ``(T, N)`` in ``x``'s dtype, contiguous, or None (with ``gate`` None): 0, and the
            product itself is returned. On a GPU it is read before the launch in front has ended
            (``launch.py``), so not what one of our kernels made in that very launch.
        gate: ``(N,)`` in ``x``'s dtype.

    Returns:
        ``(T, N)`` in ``x``'s dtype, and float32 ``(2, T, parts)``: the mean and the sum of centered
        squares of each of ``parts`` equal parts of a row.
    """
    op = _add_linear_op if x.is_cuda else add_linear_torch
    return op(x, weight, bias, scale, row_scale, residual, gate)


def normed_linear_torch(
    x: torch.Tensor,
    moments: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    column_sums: torch.Tensor,
    eps: float,
    activation: str,
    out: torch.Tensor,
) -> None:
    """Reference of :func:`normed_linear`."""
    dim = x.shape[1]
    means, squares = moments
    mean = means.mean(dim=1, keepdim=True)
    apart = (means - mean).square() * (dim / means.shape[1])
    variance = (squares + apart).sum(dim=1, keepdim=True) / dim
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to(wide).T
    y = y if scale is None else y * scale
    y = (y - mean * column_sums) * torch.rsqrt(variance + eps)
    out.copy_(y if bias is None else y + bias)
    if activation == "gelu":
        out.copy_(F.gelu(out))


def normed_linear_triton(
    x: torch.Tensor,
    moments: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    column_sums: torch.Tensor,
    eps: float,
    activation: str,
    out: torch.Tensor,
) -> None:
    """Launcher of :func:`normed_linear`."""
    extras = Extras(moments=moments, column_sums=column_sums, eps=eps)
    launch_skinny(x, weight, bias, scale, None, activation, out, extras=extras)


def _fake_normed_linear(
    x: torch.Tensor,
    moments: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    column_sums: torch.Tensor,
    eps: float,
    activation: str,
    out: torch.Tensor,
) -> None:
    return None


_normed_linear_op = register_custom_op(
    normed_linear_triton,
    op_name="flashmap_normed_linear",
    mutates_args=["out"],
    fake_impl=_fake_normed_linear,
)


def normed_linear(
    x: torch.Tensor,
    moments: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    column_sums: torch.Tensor,
    eps: float,
    *,
    scale: Optional[torch.Tensor] = None,
    activation: str = "none",
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """``act(LN(x) @ (scale · weight).T + bias)``, the norm without weights of its own.

    Args:
        x, moments: what :func:`add_linear` returned.
        weight, bias, scale, activation, out: as in ``skinny_linear``.
        column_sums: ``(N,)`` float32, sums of the rows of ``scale · weight``.
        eps: added to the variance.
    """
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    op = _normed_linear_op if x.is_cuda else normed_linear_torch
    op(x, moments, weight, bias, scale, column_sums, eps, activation, out)
    return out
