"""The drafts' own cells of a verify mask as bits, for ``verify_splitkv_gqa``.

Upstream's QLEN_ONLY mask holds a byte for every pair of a request's ``L`` drafts, and every layer
reads it behind its last tile of keys: ``L`` bytes a query row, each an address and a load. As bits
a row is one word for every 64 drafts, loaded long before it is needed. Masks are packed once a
verify step, not once a layer.

This module needs nothing of sglang but its registration helper, as ``verify_splitkv_gqa``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

try:
    from sglang.srt.utils.custom_op import register_custom_op
except ImportError:  # a copy of this file, on a machine without sglang
    register_custom_op = None

WORD_BITS = 64
_BLOCK_ROWS = 16


def words_a_row(length: int) -> int:
    """Words that hold a row of ``length`` drafts."""
    return -(-length // WORD_BITS)


def pack_verify_mask_torch(mask: torch.Tensor, words: torch.Tensor) -> None:
    """Reference of :func:`pack_verify_mask`."""
    batch, length, count = words.shape
    cells = mask.flatten()[: batch * length * length].view(batch, length, length) != 0
    cells = torch.nn.functional.pad(cells, (0, count * WORD_BITS - length)).long()
    bits = torch.arange(WORD_BITS, device=mask.device)
    # Each bit once: their sum is their union, the sign bit among them.
    words.copy_((cells.view(batch, length, count, WORD_BITS) << bits).sum(3))


@triton.jit
def _pack_kernel(
    mask_ptr,
    words_ptr,
    rows,
    L: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # Programs: (block of rows of all requests, word).
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    word = tl.program_id(1)
    bit = tl.arange(0, 64)
    column = word * 64 + bit
    cells = tl.load(
        mask_ptr + row[:, None] * L + column[None, :],
        mask=(row < rows)[:, None] & (column < L)[None, :],
        other=0,
    )
    bits = (cells != 0).to(tl.int64) << bit[None, :].to(tl.int64)
    tl.store(words_ptr + row * WORDS + word, tl.sum(bits, 1), mask=row < rows)


def pack_verify_mask_triton(mask: torch.Tensor, words: torch.Tensor) -> None:
    """Launcher of :func:`pack_verify_mask`."""
    batch, length, count = words.shape
    assert mask.is_contiguous() and mask.element_size() == 1
    assert mask.numel() >= batch * length * length
    assert words.is_contiguous() and words.dtype == torch.int64 and count == words_a_row(length)
    if words.numel() == 0:
        return
    _pack_kernel[(triton.cdiv(batch * length, _BLOCK_ROWS), count)](
        mask.view(torch.uint8),
        words,
        batch * length,
        L=length,
        WORDS=count,
        BLOCK_ROWS=_BLOCK_ROWS,
    )


def _launch(mask: torch.Tensor, words: torch.Tensor) -> None:
    pack_verify_mask_triton(mask, words)


def _fake(mask: torch.Tensor, words: torch.Tensor) -> None:
    return None


_pack_op = _launch
if register_custom_op is not None:
    _pack_op = register_custom_op(
        _launch, op_name="pack_verify_mask", mutates_args=["words"], fake_impl=_fake
    )


def pack_verify_mask(mask: torch.Tensor, words: torch.Tensor) -> None:
    """Write ``B`` masks of ``L`` drafts as bits; no step waits for the device.

    Args:
        mask: at least ``B * L * L`` bools or bytes, contiguous (upstream's QLEN_ONLY layout):
            ``[b, i, j]`` is whether draft ``i`` of request ``b`` sees draft ``j``.
        words: ``(B, L, ceil(L / 64))`` int64, written: bit ``j % 64`` of ``[b, i, j // 64]`` is
            that cell; bits past ``L`` are 0.
    """
    implementation = _pack_op if mask.is_cuda else pack_verify_mask_torch
    implementation(mask, words)
