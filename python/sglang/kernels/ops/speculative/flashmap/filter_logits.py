"""Top-k, top-p and min-p on draft logits, in place: what a request would never say is not drafted.

The target's distribution of a request with filters is 0 outside them, so a draft out there is
rejected for certain. Filtered columns become -inf, which the sampler never draws and a softmax
gives probability 0: sampler and accept rule see one proposal. The proposal need not have the
target's support for that: any filter of it is as lossless as another.

Every filter keeps the columns from some logit on, ties included, and looks at the unfiltered
distribution: top-k those of at least the k-th largest logit, top-p those with at most mass ``p``
above them, min-p those of at least ``min_p`` times the largest probability. The kernel finds the
first two thresholds bit by bit, in the order of the floats' bits: as many passes over the row as a
logit has bits, and no sort. A row without filters costs nothing.
"""

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op

_MAX_BLOCK = 16384
# Bits of a float32 that are 0 in every value of a narrower dtype.
_ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def filter_logits_torch(
    logits: torch.Tensor, temperatures: torch.Tensor, filters: torch.Tensor
) -> None:
    """Reference of :func:`filter_logits`; reads on the host which rows have filters."""
    rows = ((temperatures > 0) & (filters > 0).any(dim=1)).nonzero().squeeze(1)
    if not rows.numel():
        return
    temperature, (top_k, top_p, min_p) = temperatures[rows, None], filters[rows].T[..., None]
    values = logits[rows].float()
    ranked = values.sort(dim=1, descending=True).values
    mass = (ranked / temperature).softmax(dim=1).cumsum(dim=1)
    none = torch.full_like(temperature, float("-inf"))
    last = ranked.shape[1] - 1
    kth = ranked.gather(1, (top_k.long() - 1).clamp(0, last))
    # The first rank whose mass, its own included, is above p.
    reached = (mass <= top_p).sum(dim=1, keepdim=True)
    pth = torch.where(reached > last, none, ranked.gather(1, reached.clamp_max(last)))
    threshold = torch.where(top_k > 0, kth, none)
    threshold = torch.maximum(threshold, torch.where(top_p > 0, pth, none))
    least = ranked[:, :1] + temperature * min_p.log()  # -inf without min-p
    logits[rows] = logits[rows].masked_fill(values < torch.maximum(threshold, least), float("-inf"))


@triton.jit
def _ordered(value):
    """uint32 keys in the order of float32 ``value``."""
    bits = value.to(tl.int32, bitcast=True)
    flip = (bits >> 31).to(tl.uint32, bitcast=True) | 0x80000000
    return bits.to(tl.uint32, bitcast=True) ^ flip


@triton.jit
def _filter_kernel(
    logits_ptr,
    temperatures_ptr,
    filters_ptr,
    stride,
    vocab,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Programs: rows.
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(filters_ptr + 3 * row)
    top_p = tl.load(filters_ptr + 3 * row + 1)
    min_p = tl.load(filters_ptr + 3 * row + 2)
    if (temperature <= 0) | ((top_k <= 0) & (top_p <= 0) & (min_p <= 0)):
        return
    inverse = 1.0 / temperature
    line = logits_ptr + row * stride
    ninf = float("-inf")
    column = tl.arange(0, BLOCK)
    peak = tl.full((), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        x = tl.load(line + first + column, mask=first + column < vocab, other=ninf).to(tl.float32)
        peak = tl.maximum(peak, tl.max(x, 0))
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, vocab, BLOCK):
        x = tl.load(line + first + column, mask=first + column < vocab, other=ninf).to(tl.float32)
        total += tl.sum(tl.exp((x - peak) * inverse), 0)
    # The largest keys from which on there are k columns, and mass above p.
    k_key = tl.full((), 0, tl.uint32)
    p_key = tl.full((), 0, tl.uint32)
    for i in range(BITS):
        bit = (tl.full((), 1, tl.int64) << (31 - i)).to(tl.uint32)
        k_try = k_key + bit
        p_try = p_key + bit
        columns = tl.full((), 0, tl.int32)
        mass = tl.full((), 0.0, tl.float32)
        for first in range(0, vocab, BLOCK):
            inside = first + column < vocab
            x = tl.load(line + first + column, mask=inside, other=ninf).to(tl.float32)
            key = _ordered(x)
            columns += tl.sum((inside & (key >= k_try)).to(tl.int32), 0)
            mass += tl.sum(tl.where(key >= p_try, tl.exp((x - peak) * inverse), 0.0), 0)
        k_key = tl.where(columns.to(tl.float32) >= top_k, k_try, k_key)
        p_key = tl.where(mass > top_p * total, p_try, p_key)
    threshold = tl.where(top_k > 0, k_key, 0)
    threshold = tl.maximum(threshold, tl.where(top_p > 0, p_key, 0))
    least = tl.where(min_p > 0, peak + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0)), ninf)
    for first in range(0, vocab, BLOCK):
        inside = first + column < vocab
        x = tl.load(line + first + column, mask=inside, other=ninf).to(tl.float32)
        drop = inside & ((_ordered(x) < threshold) | (x < least))
        tl.store(line + first + column, ninf, mask=drop)


def filter_logits_triton(
    logits: torch.Tensor, temperatures: torch.Tensor, filters: torch.Tensor
) -> None:
    """Launcher of :func:`filter_logits`."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert temperatures.shape == (rows,) and temperatures.is_contiguous()
    assert filters.shape == (rows, 3) and filters.is_contiguous()
    assert temperatures.dtype == filters.dtype == torch.float32
    if rows:
        block = min(triton.next_power_of_2(vocab), _MAX_BLOCK)
        _filter_kernel[(rows,)](
            logits,
            temperatures,
            filters,
            logits.stride(0),
            vocab,
            BITS=32 - _ZERO_BITS[logits.dtype],
            BLOCK=block,
            num_warps=min(max(block // 1024, 1), 16),
            **launch_options(logits.device),
        )


def _fake_filter_logits(
    logits: torch.Tensor, temperatures: torch.Tensor, filters: torch.Tensor
) -> None:
    return None


_filter_logits_op = register_custom_op(
    filter_logits_triton,
    op_name="flashmap_filter_logits",
    mutates_args=["logits"],
    fake_impl=_fake_filter_logits,
)


def filter_logits(logits: torch.Tensor, temperatures: torch.Tensor, filters: torch.Tensor) -> None:
    """Set the columns to -inf that a row's filters leave out.

    Args:
        logits: ``(R, V)`` float32, bfloat16 or float16, changed in place; columns are contiguous.
        temperatures: ``(R,)`` float32, at which top-p and min-p weigh; rows at 0 stay as they are.
        filters: ``(R, 3)`` float32 contiguous: top-k, top-p and min-p, 0 where a row has none.
    """
    (_filter_logits_op if logits.is_cuda else filter_logits_torch)(logits, temperatures, filters)
