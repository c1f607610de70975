"""Widens tree masks to what attention backends of prefix-wide masks read.

Upstream's fa3, flashinfer and Triton backends take a verify mask whose row ``i`` of request ``b``
holds ``prefix_lens[b] + W`` cells: ones for the committed prefix, then row ``i`` of the tree's own
``(W, W)`` mask; rows of one request follow each other, then those of the next. Where a request
starts depends on all earlier lengths, which only the device knows, so each program adds them up
itself, and the host needs no length.

Bytes: ``W (prefix + W)`` written a request, 74 KB for ``W = 17`` after 4096 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.utils.custom_op import register_custom_op

_BLOCK = 1024
# Programs that share a row when there are few rows.
_PROGRAMS = 256


def write_full_mask_torch(mask: torch.Tensor, prefix_lens: torch.Tensor, out: torch.Tensor) -> None:
    """Reference of :func:`write_full_mask`."""
    width = mask.shape[1]
    start = 0
    for tree, prefix in zip(mask, prefix_lens.tolist()):
        rows = out[start : start + width * (prefix + width)].view(width, -1)
        rows[:, :prefix] = True
        rows[:, prefix:] = tree
        start += rows.numel()


@triton.jit
def _full_mask_kernel(
    mask_ptr,
    lens_ptr,
    out_ptr,
    share,
    WIDTH: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Programs: (request, row, share of the row's blocks).
    request = tl.program_id(0)
    row = tl.program_id(1)
    others = tl.arange(0, BATCH)
    before = tl.sum(tl.load(lens_ptr + others, mask=others < request, other=0).to(tl.int64), 0)
    prefix = tl.load(lens_ptr + request).to(tl.int64)
    length = prefix + WIDTH
    out_row = out_ptr + (before + request * WIDTH) * WIDTH + row * length
    mask_row = mask_ptr + (request * WIDTH + row).to(tl.int64) * WIDTH
    for first in range(tl.program_id(2) * BLOCK, length, share * BLOCK):
        column = first + tl.arange(0, BLOCK)
        cell = tl.load(
            mask_row + column - prefix, mask=(column >= prefix) & (column < length), other=1
        )
        tl.store(out_row + column, cell, mask=column < length)


def write_full_mask_triton(
    mask: torch.Tensor, prefix_lens: torch.Tensor, out: torch.Tensor
) -> None:
    """Launcher of :func:`write_full_mask`."""
    batch, width, _ = mask.shape
    assert mask.shape == (batch, width, width) and mask.dtype == torch.bool
    assert mask.is_contiguous() and prefix_lens.is_contiguous() and out.is_contiguous()
    assert prefix_lens.shape == (batch,) and out.dim() == 1 and out.element_size() == 1
    if batch == 0:
        return
    share = max(1, _PROGRAMS // (batch * width))
    _full_mask_kernel[(batch, width, share)](
        mask.view(torch.uint8),
        prefix_lens,
        out.view(torch.uint8),
        share,
        WIDTH=width,
        # Few variants: a new one is compiled while requests wait.
        BATCH=max(64, triton.next_power_of_2(batch)),
        BLOCK=_BLOCK,
    )


def _fake_write_full_mask(mask: torch.Tensor, prefix_lens: torch.Tensor, out: torch.Tensor) -> None:
    return None


_write_full_mask_op = register_custom_op(
    write_full_mask_triton,
    op_name="flashmap_write_full_mask",
    mutates_args=["out"],
    fake_impl=_fake_write_full_mask,
)


def write_full_mask(mask: torch.Tensor, prefix_lens: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``B`` tree masks with their prefixes into ``out``; no step waits for the device.

    Args:
        mask: ``(B, W, W)`` bool, true where a row attends a node.
        prefix_lens: ``(B,)`` integers, committed tokens before the tree.
        out: at least ``sum(W (prefix_lens + W))`` cells of bool or uint8; cells after these keep
            their values.
    """
    implementation = _write_full_mask_op if mask.is_cuda else write_full_mask_torch
    implementation(mask, prefix_lens, out)
