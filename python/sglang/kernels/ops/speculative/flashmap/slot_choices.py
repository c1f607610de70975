"""The few tokens worth a node of a tree at each slot, and how likely each draw makes them.

:func:`~.tree_growth.grow_tree` works on a short list of tokens a slot: the likeliest of every draw,
as every draw sees them. A first kernel goes once over each row of logits, keeping its likeliest
columns and the sum of its exponentials. Few tiles hold one of the best but the first, so what a
tile costs is its load and two reductions. A second kernel looks up each column in every draw.
The logits are read once, ``B N K V`` of them; nothing else is of a size that matters.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op

_MAX_BLOCK = 8192


def slot_choices_torch(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    count: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Reference of :func:`slot_choices`."""
    draws = logits.shape[1]
    heat = torch.where(temperatures > 0, temperatures, 1.0)
    scaled = logits.float() / heat[:, None, None, None]
    columns = scaled.topk(count, dim=-1).indices.transpose(1, 2).flatten(2)
    index = columns[:, None].expand(-1, draws, -1, -1)
    probs = (scaled.gather(3, index) - scaled.logsumexp(dim=-1, keepdim=True)).exp()
    repeated = (columns[..., :, None] == columns[..., None, :]).tril(-1).any(dim=-1)
    probs = probs.permute(0, 2, 3, 1).masked_fill(repeated[..., None], 0)
    return columns if ids is None else ids[columns], probs.contiguous()


@triton.jit
def _top_columns_kernel(
    logits_ptr,
    temperatures_ptr,
    columns_ptr,
    norms_ptr,
    rows_per_request,
    vocab,
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    ninf = float("-inf")
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row // rows_per_request)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    place = tl.arange(0, BLOCK_COUNT)
    # Places past COUNT are never the least.
    best = tl.where(place < COUNT, ninf, float("inf"))
    best_column = tl.zeros((BLOCK_COUNT,), tl.int32)
    least = tl.min(best, 0)
    peak = tl.full((), -3.0e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * vocab + column, mask=column < vocab, other=ninf)
        x = x.to(tl.float32)
        top = tl.max(x, 0)
        risen = tl.maximum(peak, top)
        total *= tl.exp((peak - risen) * inverse)
        total += tl.sum(tl.exp((x - risen) * inverse), 0)
        peak = risen
        while top > least:
            top_column = tl.min(tl.where(x == top, column, vocab), 0)
            dropped = place == tl.min(tl.where(best == least, place, BLOCK_COUNT), 0)
            best = tl.where(dropped, top, best)
            best_column = tl.where(dropped, top_column, best_column)
            least = tl.min(best, 0)
            x = tl.where(column == top_column, ninf, x)
            top = tl.max(x, 0)
    tl.store(columns_ptr + row * COUNT + place, best_column, mask=place < COUNT)
    tl.store(norms_ptr + row, peak * inverse + tl.log(total))


@triton.jit
def _choice_probs_kernel(
    logits_ptr,
    ids_ptr,
    temperatures_ptr,
    columns_ptr,
    norms_ptr,
    tokens_ptr,
    probs_ptr,
    vocab,
    N: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    # Programs: (request, slot).
    request = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + request)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    u = tl.arange(0, BLOCK_U)
    j = tl.arange(0, BLOCK_N)
    first_row = request * (N * K) + slot
    own = columns_ptr + (first_row + (u // COUNT) * K) * COUNT + u % COUNT
    column = tl.load(own, mask=u < N * COUNT, other=-1)
    before = (column[:, None] == column[None, :]) & (u[None, :] < u[:, None])
    repeated = tl.max(before.to(tl.int32), 1) > 0
    row = first_row + j * K
    mask = (u < N * COUNT)[:, None] & (j < N)[None, :]
    x = tl.load(logits_ptr + row[None, :] * vocab + column[:, None], mask=mask, other=0.0)
    norm = tl.load(norms_ptr + row, mask=j < N, other=0.0)
    probs = tl.exp(x.to(tl.float32) * inverse - norm[None, :])
    probs = tl.where(repeated[:, None], 0.0, probs)
    out = (request * K + slot) * (N * COUNT) + u
    tl.store(probs_ptr + out[:, None] * N + j[None, :], probs, mask=mask)
    token = column.to(tl.int64)
    if HAS_IDS:
        token = tl.load(ids_ptr + token, mask=u < N * COUNT, other=0)
    tl.store(tokens_ptr + out, token, mask=u < N * COUNT)


def slot_choices_triton(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    count: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Launcher of :func:`slot_choices`."""
    batch, draws, slots, vocab = logits.shape
    assert logits.is_contiguous() and count <= vocab
    assert temperatures.shape == (batch,) and temperatures.dtype == torch.float32
    assert ids is None or (ids.shape == (vocab,) and ids.dtype == torch.int64)
    tokens, probs = _fake_slot_choices(logits, ids, temperatures, count)
    rows = batch * draws * slots
    if rows == 0:
        return tokens, probs
    columns = torch.empty((rows, count), dtype=torch.int32, device=logits.device)
    norms = torch.empty((rows,), dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(vocab), _MAX_BLOCK)
    _top_columns_kernel[(rows,)](
        logits,
        temperatures,
        columns,
        norms,
        draws * slots,
        vocab,
        COUNT=count,
        BLOCK_COUNT=triton.next_power_of_2(count),
        BLOCK=block,
        num_warps=min(max(block // 1024, 1), 8),
        **launch_options(logits.device),
    )
    block_u, block_n = triton.next_power_of_2(draws * count), triton.next_power_of_2(draws)
    _choice_probs_kernel[(batch, slots)](
        logits,
        ids if ids is not None else tokens,
        temperatures,
        columns,
        norms,
        tokens,
        probs,
        vocab,
        N=draws,
        K=slots,
        COUNT=count,
        HAS_IDS=ids is not None,
        BLOCK_U=block_u,
        BLOCK_N=block_n,
        num_warps=min(max(block_u * block_u // 512, 1), 8),
        **launch_options(logits.device),
    )
    return tokens, probs


def _fake_slot_choices(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    count: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    batch, draws, slots, _ = logits.shape
    shape, device = (batch, slots, draws * count), logits.device
    tokens = torch.empty(shape, dtype=torch.int64, device=device)
    return tokens, torch.empty((*shape, draws), dtype=torch.float32, device=device)


_slot_choices_op = register_custom_op(
    slot_choices_triton,
    op_name="flashmap_slot_choices",
    mutates_args=[],
    fake_impl=_fake_slot_choices,
)


def slot_choices(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    count: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each slot under ``N`` draws of noise.

    Args:
        logits: ``(B, N, K, V)`` float32, bfloat16 or float16, contiguous; -inf leaves a column out.
        ids: ``(V,)`` int64, the token id of each column of a restricted vocabulary; None when
            they coincide.
        temperatures: ``(B,)`` float32; a row at 0 is taken at 1.
        count: the likeliest tokens taken of each draw; ``U = N count``.

    Returns:
        ``tokens (B, K, U)`` int64, in no order; ``probs (B, K, U, N)`` float32, what each draw
        gives them, 0 for a token that the slot lists before.
    """
    implementation = _slot_choices_op if logits.is_cuda else slot_choices_torch
    return implementation(logits, ids, temperatures, count)
