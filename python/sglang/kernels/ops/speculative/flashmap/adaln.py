"""Gated residual and time-modulated LayerNorm (AdaLN) in one pass over the residual stream.

``x_new = x + gate * branch`` and ``h = LayerNorm(x_new) * scale1 + shift``. The modulations depend
on the jump's two times alone, so the caller computes them once and passes ``scale1 = 1 + scale``.
Rounding follows the reference model's eager operations in ``x``'s dtype: the gated branch, the sum,
the normed value, the scaled value and the shifted value are each rounded. Only the statistics
differ, by the order of their float32 sums; in float32 the compiler may also contract a product and
a sum into one fused multiply-add.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op


def adaln_torch(
    x: torch.Tensor,
    branch: Optional[torch.Tensor],
    gate: Optional[torch.Tensor],
    scale1: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Reference of :func:`adaln`."""
    if branch is not None:
        x = x + gate * branch
    return x, F.layer_norm(x, x.shape[-1:], eps=eps) * scale1 + shift


@triton.jit
def _adaln_kernel(
    x_ptr,
    branch_ptr,
    gate_ptr,
    scale1_ptr,
    shift_ptr,
    x_new_ptr,
    h_ptr,
    dim,
    eps,
    HAS_BRANCH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    col = tl.arange(0, BLOCK)
    offset = tl.program_id(0).to(tl.int64) * dim + col
    mask = col < dim
    scale1 = tl.load(scale1_ptr + col, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        gate = tl.load(gate_ptr + col, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        x = (x + (gate * branch).to(dtype).to(tl.float32)).to(dtype)
        tl.store(x_new_ptr + offset, x, mask=mask)
        x = x.to(tl.float32)
    centered = tl.where(mask, x - tl.sum(x, 0) / dim, 0.0)
    inverse_std = tl.rsqrt(tl.sum(centered * centered, 0) / dim + eps)
    normed = (centered * inverse_std).to(dtype).to(tl.float32)
    scaled = (normed * scale1).to(dtype).to(tl.float32)
    tl.store(h_ptr + offset, (scaled + shift).to(dtype), mask=mask)


def adaln_triton(
    x: torch.Tensor,
    branch: Optional[torch.Tensor],
    gate: Optional[torch.Tensor],
    scale1: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Launcher of :func:`adaln`; without a branch the first result is empty: an op cannot return
    its own input."""
    rows, dim = x.shape
    assert x.is_contiguous() and (branch is None) == (gate is None)
    assert branch is None or (branch.shape == x.shape and branch.is_contiguous())
    for modulation in (scale1, shift) if gate is None else (scale1, shift, gate):
        assert modulation.shape == (dim,) and modulation.is_contiguous()
        assert modulation.dtype == x.dtype
    x_new, h = _fake_adaln(x, branch, gate, scale1, shift, eps)
    if rows:
        block = triton.next_power_of_2(dim)
        _adaln_kernel[(rows,)](
            x,
            branch if branch is not None else x,
            gate if gate is not None else shift,
            scale1,
            shift,
            x_new,
            h,
            dim,
            eps,
            HAS_BRANCH=branch is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
            **launch_options(x.device),
        )
    return x_new, h


def _fake_adaln(
    x: torch.Tensor,
    branch: Optional[torch.Tensor],
    gate: Optional[torch.Tensor],
    scale1: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    x_new = torch.empty_like(x) if branch is not None else x.new_empty((0,))
    return x_new, torch.empty_like(x)


_adaln_op = register_custom_op(
    adaln_triton,
    op_name="flashmap_adaln",
    mutates_args=[],
    fake_impl=_fake_adaln,
)


def adaln(
    x: torch.Tensor,
    branch: Optional[torch.Tensor],
    gate: Optional[torch.Tensor],
    scale1: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Add a gated branch to the residual stream and modulate its LayerNorm.

    Args:
        x: ``(T, d)`` float32, bfloat16 or float16, contiguous.
        branch: ``(T, d)``, the layer output to add, or None (with ``gate`` None) to add nothing.
        gate: ``(d,)``.
        scale1: ``(d,)``, one plus the scale.
        shift: ``(d,)``.
        eps: added to the variance.

    All tensors have ``x``'s dtype.

    Returns:
        ``x_new (T, d) = x + gate * branch`` (``x`` itself without a branch) and
        ``h (T, d) = LayerNorm(x_new) * scale1 + shift``.
    """
    if not x.is_cuda:
        return adaln_torch(x, branch, gate, scale1, shift, eps)
    x_new, h = _adaln_op(x, branch, gate, scale1, shift, eps)
    return (x if branch is None else x_new), h
