"""Copies a step's draft inputs into the buffers that a captured graph reads, in one launch.

A graph of ``M`` requests serves any batch of ``B ≤ M``; the requests past ``B`` are padding, of
which only ``active`` is cleared: what else they hold is never read for a result.
"""

from __future__ import annotations

from typing import List

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op

_DTYPES = (
    torch.int64,
    torch.int64,
    torch.int64,
    torch.float32,
    torch.int32,
    torch.float32,
    torch.bool,
)
_BLOCK = 64


def stage_inputs_torch(inputs: List[torch.Tensor], buffers: List[torch.Tensor]) -> None:
    """Reference of :func:`stage_inputs`."""
    size = inputs[0].shape[0]
    for buffer, value in zip(buffers, inputs, strict=True):
        buffer[:size].copy_(value)
    buffers[4][size:].zero_()


@triton.jit
def _stage_kernel(
    anchors_ptr,
    seq_lens_ptr,
    rows_ptr,
    temperatures_ptr,
    active_ptr,
    filters_ptr,
    chain_ptr,
    anchors_out,
    seq_lens_out,
    rows_out,
    temperatures_out,
    active_out,
    filters_out,
    chain_out,
    size,
    captured,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = b < size
    tl.store(anchors_out + b, tl.load(anchors_ptr + b, mask=real), mask=real)
    tl.store(seq_lens_out + b, tl.load(seq_lens_ptr + b, mask=real), mask=real)
    tl.store(rows_out + b, tl.load(rows_ptr + b, mask=real), mask=real)
    tl.store(temperatures_out + b, tl.load(temperatures_ptr + b, mask=real), mask=real)
    tl.store(chain_out + b, tl.load(chain_ptr + b, mask=real), mask=real)
    tl.store(active_out + b, tl.load(active_ptr + b, mask=real, other=0), mask=b < captured)
    for kind in tl.static_range(3):
        value = tl.load(filters_ptr + 3 * b + kind, mask=real)
        tl.store(filters_out + 3 * b + kind, value, mask=real)


def stage_inputs_triton(inputs: List[torch.Tensor], buffers: List[torch.Tensor]) -> None:
    """Launcher of :func:`stage_inputs`."""
    size, captured = inputs[0].shape[0], buffers[0].shape[0]
    assert size <= captured
    for value, buffer, dtype in zip(inputs, buffers, _DTYPES, strict=True):
        assert value.dtype == buffer.dtype == dtype
        assert value.is_contiguous() and buffer.is_contiguous()
        assert len(value) == size and len(buffer) == captured
        assert value.shape[1:] == buffer.shape[1:]
    if captured:
        _stage_kernel[(triton.cdiv(captured, _BLOCK),)](
            *inputs,
            *buffers,
            size,
            captured,
            BLOCK=_BLOCK,
            num_warps=2,
            **launch_options(inputs[0].device),
        )


def _fake_stage_inputs(inputs: List[torch.Tensor], buffers: List[torch.Tensor]) -> None:
    return None


_stage_inputs_op = register_custom_op(
    stage_inputs_triton,
    op_name="flashmap_stage_inputs",
    mutates_args=["buffers"],
    fake_impl=_fake_stage_inputs,
)


def stage_inputs(inputs: List[torch.Tensor], buffers: List[torch.Tensor]) -> None:
    """Copy ``inputs`` of ``B`` requests to ``buffers`` of ``M ≥ B``; padding becomes inactive.

    Args:
        inputs: the fields of ``DraftInputs`` in order, contiguous: anchors, seq_lens and rows
            ``(B,)`` int64, temperatures ``(B,)`` float32, active ``(B,)`` int32, filters ``(B, 3)``
            float32, chain ``(B,)`` bool.
        buffers: likewise, of ``M`` requests.
    """
    (_stage_inputs_op if inputs[0].is_cuda else stage_inputs_torch)(inputs, buffers)
