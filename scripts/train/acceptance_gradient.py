"""Statistics and gradient of an acceptance loss, in Triton. Equations: `acceptance_loss.py`.

A program takes one row. The statistics kernel reads the draft's and the target's logits twice each,
for their normalisers and for the sums over both distributions; the loss is a function of its three
numbers a row, so its derivatives are known only then, and the gradient kernel reads both once more
and puts the gradient where the draft's logits were. A row's two sets of logits, 4 V bytes in half
precision, are mostly still in the cache when they are read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from train.softmax_gradient import row_normaliser

_BLOCK = 4096


@triton.jit
def _statistics(
    logits, known, ids, cross_entropy, overlap, log_ratio, normaliser, known_normaliser, below,
    size, stride, BLOCK: tl.constexpr,
):  # fmt: skip # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x_row, z_row = logits + row * stride, known + row * stride
    x_all = row_normaliser(x_row, size, BLOCK)
    z_all = row_normaliser(z_row, size, BLOCK)
    hit = tl.zeros([BLOCK], tl.float32)
    common = tl.zeros([BLOCK], tl.float32)
    under = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        place = start + columns
        inside = place < size
        x = tl.load(x_row + place, mask=inside, other=-float("inf")).to(tl.float32)
        z = tl.load(z_row + place, mask=inside, other=-float("inf")).to(tl.float32)
        q, p = tl.exp(x - x_all), tl.exp(z - z_all)
        hit += tl.where(inside, p * x, 0.0)
        common += tl.minimum(p, q)
        under += tl.where(q < p, q, 0.0)
    label = tl.load(ids + row)
    x_at = tl.load(x_row + label).to(tl.float32)
    z_at = tl.load(z_row + label).to(tl.float32)
    tl.store(cross_entropy + row, x_all - tl.sum(hit, axis=0))
    tl.store(overlap + row, tl.sum(common, axis=0))
    tl.store(log_ratio + row, (x_at - x_all) - (z_at - z_all))
    tl.store(normaliser + row, x_all)
    tl.store(known_normaliser + row, z_all)
    tl.store(below + row, tl.sum(under, axis=0))


@triton.jit
def _gradient(
    logits, known, ids, normaliser, known_normaliser, below, by_entropy, by_overlap, by_ratio,
    size, stride, scale, BLOCK: tl.constexpr,
):  # fmt: skip # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x_row, z_row = logits + row * stride, known + row * stride
    x_all, z_all = tl.load(normaliser + row), tl.load(known_normaliser + row)
    under, label = tl.load(below + row), tl.load(ids + row)
    entropy, common = tl.load(by_entropy + row) * scale, tl.load(by_overlap + row) * scale
    ratio = tl.load(by_ratio + row) * scale
    for start in range(0, size, BLOCK):
        place = start + columns
        inside = place < size
        x = tl.load(x_row + place, mask=inside, other=-float("inf")).to(tl.float32)
        z = tl.load(z_row + place, mask=inside, other=-float("inf")).to(tl.float32)
        q, p = tl.exp(x - x_all), tl.exp(z - z_all)
        slope = entropy * (q - p) + common * q * (tl.where(q < p, 1.0, 0.0) - under)
        slope += ratio * (tl.where(place == label, 1.0, 0.0) - q)
        tl.store(x_row + place, slope.to(logits.dtype.element_ty), mask=inside)


def _check(logits: torch.Tensor, known: torch.Tensor, ids: torch.Tensor) -> None:
    assert logits.shape == known.shape and ids.shape == logits.shape[:1]
    assert logits.is_contiguous() and known.is_contiguous() and ids.is_contiguous()


def acceptance_statistics(
    logits: torch.Tensor, known: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Six `(n,)` float32: cross-entropy, overlap, log ratio, both normalisers, mass below.

    `logits`, `known (n, V)` contiguous, `ids (n,)` int64.
    """
    _check(logits, known, ids)
    rows, size = logits.shape
    out = torch.empty(6, rows, dtype=torch.float32, device=logits.device).unbind()
    block = min(_BLOCK, triton.next_power_of_2(size))
    _statistics[(rows,)](logits, known, ids, *out, size, size, BLOCK=block, num_warps=8)
    return out


def acceptance_gradient(
    logits: torch.Tensor,
    known: torch.Tensor,
    ids: torch.Tensor,
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    by: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """`logits`, which become the gradient times `scale`.

    `found` are both normalisers and the mass below, `by` the loss's derivatives in cross-entropy,
    overlap and log ratio, each `(n,)` float32.
    """
    _check(logits, known, ids)
    rows, size = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(size))
    by = [some.float().contiguous() for some in by]
    _gradient[(rows,)](
        logits, known, ids, *found, *by, size, size, scale, BLOCK=block, num_warps=8
    )
    return logits
