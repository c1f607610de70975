"""Loss and gradient of a softmax cross-entropy, in place, in Triton.

A program takes one row. It reads the row twice: once for the maximum and the sum of exponentials
(online, as in FlashAttention) of the logits and of the teachers' logits, once for the loss and the
gradient, which replaces the logits. Per number of a row that is `2 reads + 1 write`, and 2 reads a
teacher, of the head's dtype; the GEMM around it moves as much once. In torch the same takes about
a dozen passes in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def row_normaliser(row, size, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    """`logsumexp` of `size` numbers at `row`."""
    columns = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + columns < size
        x = tl.load(row + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A lane that has seen nothing yet has no maximum: -inf - -inf would be NaN.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.exp(x - shift)
        top = higher
    peak = tl.max(top, axis=0)
    return peak + tl.log(tl.sum(total * tl.exp(top - peak), axis=0))


@triton.jit
def _softmax_gradient(
    logits, ids, first, second, share, weights, loss, size, stride, scale,
    TEACHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x_row = logits + row * stride
    normaliser = row_normaliser(x_row, size, BLOCK)
    weight = tl.load(weights + row)
    if TEACHERS == 0:
        label = tl.load(ids + row)
    else:
        first_row = first + row * stride
        first_normaliser = row_normaliser(first_row, size, BLOCK)
    if TEACHERS == 2:
        second_row = second + row * stride
        second_normaliser = row_normaliser(second_row, size, BLOCK)
        part = tl.load(share + row)
    hit = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        place = start + columns
        inside = place < size
        x = tl.load(x_row + place, mask=inside, other=-float("inf")).to(tl.float32)
        if TEACHERS == 0:
            wanted = tl.where(place == label, 1.0, 0.0)
        else:
            a = tl.load(first_row + place, mask=inside, other=-float("inf")).to(tl.float32)
            wanted = tl.exp(a - first_normaliser)
        if TEACHERS == 2:
            b = tl.load(second_row + place, mask=inside, other=-float("inf")).to(tl.float32)
            wanted = part * wanted + (1.0 - part) * tl.exp(b - second_normaliser)
        hit += tl.where(inside, wanted * x, 0.0)
        excess = (tl.exp(x - normaliser) - wanted) * weight * scale
        tl.store(x_row + place, excess.to(logits.dtype.element_ty), mask=inside)
    tl.store(loss + row, weight * (normaliser - tl.sum(hit, axis=0)))


def softmax_gradient(
    logits: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    *,
    ids: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    second: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
) -> torch.Tensor:
    """`loss (n,)` float32 a row; `logits (n, V)` become `weights · scale · (softmax − wanted)`.

    `wanted` is the one-hot of `ids (n,)` int64, or `softmax(first)`, or
    `share · softmax(first) + (1 − share) · softmax(second)`; all logits contiguous, of one dtype.
    """
    rows, size = logits.shape
    teachers = (first is not None) + (second is not None)
    for other in (first, second):
        assert other is None or (other.shape == logits.shape and other.is_contiguous())
    assert logits.is_contiguous() and (ids is not None) == (teachers == 0)
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    unused = loss
    _softmax_gradient[(rows,)](
        logits,
        unused if ids is None else ids,
        unused if first is None else first,
        unused if second is None else second,
        unused if share is None else share.float().contiguous(),
        weights.float().contiguous(),
        loss,
        size,
        size,
        scale,
        TEACHERS=teachers,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        num_warps=8,
    )
    return loss
