"""What a draft reads of its requests' sampling parameters, in one launch.

A draft takes a temperature of 0 for the argmax, upstream a top-k of 1; a draft takes 0 for a filter
that is not asked for, upstream a value that keeps everything.
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

_BLOCK = 64
LEAST_TEMPERATURE = 1e-5
"""Below it a sampled request is taken at it: logits are divided by temperatures."""


def sampling_inputs_torch(
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    by_top_k: bool,
    by_top_p: bool,
    by_min_p: bool,
    factor: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Reference of :func:`sampling_inputs`."""
    filters = temperatures.new_zeros(len(temperatures), 3)
    if by_top_k:
        filters[:, 0] = top_ks
    if by_top_p:
        filters[:, 1] = torch.where(top_ps < 1, top_ps, 0.0)
    if by_min_p:
        filters[:, 2] = min_ps
    heats = temperatures.clamp_min(LEAST_TEMPERATURE) * factor
    return torch.where(top_ks <= 1, 0.0, heats.clamp_min(LEAST_TEMPERATURE)), filters


@triton.jit
def _sampling_inputs_kernel(
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    out_ptr,
    filters_ptr,
    size,
    by_top_k,
    by_top_p,
    by_min_p,
    factor,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = b < size
    temperature = tl.load(temperatures_ptr + b, mask=real, other=0.0)
    top_k = tl.load(top_ks_ptr + b, mask=real, other=1)
    top_p = tl.load(top_ps_ptr + b, mask=real, other=1.0)
    min_p = tl.load(min_ps_ptr + b, mask=real, other=0.0)
    heat = tl.maximum(tl.maximum(temperature, LEAST) * factor, LEAST)
    heat = tl.where(top_k <= 1, 0.0, heat)
    tl.store(out_ptr + b, heat, mask=real)
    k = tl.where(by_top_k != 0, top_k.to(tl.float32), 0.0)
    p = tl.where((by_top_p != 0) & (top_p < 1), top_p, 0.0)
    tl.store(filters_ptr + 3 * b, k, mask=real)
    tl.store(filters_ptr + 3 * b + 1, p, mask=real)
    tl.store(filters_ptr + 3 * b + 2, tl.where(by_min_p != 0, min_p, 0.0), mask=real)


def sampling_inputs_triton(
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    by_top_k: bool,
    by_top_p: bool,
    by_min_p: bool,
    factor: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Launcher of :func:`sampling_inputs`."""
    inputs = (temperatures, top_ks, top_ps, min_ps)
    assert temperatures.dtype == top_ps.dtype == min_ps.dtype == torch.float32
    assert all(x.shape == temperatures.shape and x.is_contiguous() for x in inputs)
    flags = by_top_k, by_top_p, by_min_p
    outputs = _fake_sampling_inputs(*inputs, *flags, factor)
    size = len(temperatures)
    if size:
        _sampling_inputs_kernel[(triton.cdiv(size, _BLOCK),)](
            *inputs,
            *outputs,
            size,
            *map(int, flags),
            float(factor),
            LEAST=LEAST_TEMPERATURE,
            BLOCK=_BLOCK,
            num_warps=2,
            **launch_options(temperatures.device),
        )
    return outputs


def _fake_sampling_inputs(
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    by_top_k: bool,
    by_top_p: bool,
    by_min_p: bool,
    factor: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(temperatures), temperatures.new_empty((len(temperatures), 3))


_sampling_inputs_op = register_custom_op(
    sampling_inputs_triton,
    op_name="flashmap_sampling_inputs",
    mutates_args=[],
    fake_impl=_fake_sampling_inputs,
)


def sampling_inputs(
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    by_top_k: bool,
    by_top_p: bool,
    by_min_p: bool,
    factor: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Temperatures and filters of ``B`` requests, as a draft takes them.

    Args:
        temperatures: ``(B,)`` float32; top_ks: ``(B,)`` int32, at most 1 for greedy requests.
        top_ps, min_ps: ``(B,)`` float32.
        by_top_k, by_top_p, by_min_p: whether some request has that filter.
        factor: of the temperatures of sampled requests.

    Returns:
        Temperatures ``(B,)`` float32, 0 for greedy requests and above 0 for others, and filters
        ``(B, 3)`` float32: top-k, top-p and min-p, all 0 of a kind that no request has, and top-p
        0 for requests without one.
    """
    implementation = _sampling_inputs_op if temperatures.is_cuda else sampling_inputs_torch
    flags = by_top_k, by_top_p, by_min_p
    return implementation(temperatures, top_ks, top_ps, min_ps, *flags, factor)
