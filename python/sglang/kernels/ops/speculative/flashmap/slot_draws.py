"""The tokens worth a node of a tree that is verified by rejection: draws of each slot, in order.

Rejection on a tree is unbiased if the children of a node are draws from the draft, and if which
nodes there are does not depend on what was drawn. :mod:`.slot_choices` lists the likeliest tokens
instead, with their own likelihoods; here a slot's list is its first draws without replacement, and
what :func:`~.tree_growth.grow_tree` grows by is a profile of how much a slot's first, second ...
draw is worth, which may depend on ``q`` but not on what was drawn from it: profiles are listed by
the likelihood of a slot's likeliest token, as a draft that is sure of a slot is right more often.

The ``count`` largest of ``logits / temperature`` + Gumbel noise, in order of falling key, are an
ordered sample without replacement from the softmax: each is a draw from what the ones before left
(Vieira 2014; Kool et al., arXiv:1903.06059). The keys are those of :mod:`.sampler`, bit for bit in
their noise, so that a slot's first draw is the token that the block holds there.

A first kernel keeps the largest keys of a split of the vocabulary; tiles that cannot hold one of
them need no noise. A second one merges the splits. Candidate 0 of requests that ask for draws is
read once, ``K V`` logits of each; programs of other requests end at once.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.sampler import (
    MAX_NOISE,
    REFERENCE_COLUMNS,
    SERIES_BELOW,
    TILE,
    gumbel_keys_torch,
    gumbel_noise,
    split_vocab,
)
from sglang.srt.utils.custom_op import register_custom_op


def slot_draws_torch(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int,
    drawn: torch.Tensor,
    weights: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
) -> None:
    """Reference of :func:`slot_draws`."""
    _, draws, slots, vocab = logits.shape
    levels, count = weights.shape
    level = (probs[:, :, :count, 0].amax(-1) * levels).long().clamp_max(levels - 1)
    heat = torch.where(temperatures > 0, temperatures, 1.0)
    seeds, offsets = (x.view(-1, draws, slots)[:, 0].flatten() for x in (seeds, offsets))
    rows_drawn = drawn.repeat_interleave(slots).nonzero().squeeze(1)
    for part in rows_drawn.split(max(REFERENCE_COLUMNS // vocab, 1)):
        request, slot = part // slots, part % slots
        rows = logits[request, 0, slot]
        keys = gumbel_keys_torch(rows, heat[request], seeds[part], offsets[part], stream)
        probs[request, slot] = 0
        for u in range(count):
            # Not topk, which does not say which of equal keys it takes.
            key, column = keys.max(dim=1)
            tokens[request, slot, u] = column if ids is None else ids[column]
            worth = weights[level[request, slot], u]
            probs[request, slot, u, 0] = torch.where(key > float("-inf"), worth, 0.0)
            keys.scatter_(1, column[:, None], float("-inf"))


@triton.jit
def _top_keys_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    offsets_ptr,
    drawn_ptr,
    keys_ptr,
    columns_ptr,
    vocab,
    share,
    stream,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    SERIES_BELOW: tl.constexpr,
    MAX_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    # Programs: (slot of a request, split of the vocabulary). A split has `share` columns.
    request = (tl.program_id(0) // K).to(tl.int64)
    if tl.load(drawn_ptr + request) == 0:
        return
    split = tl.program_id(1)
    row = request * (N * K) + tl.program_id(0) % K
    temperature = tl.load(temperatures_ptr + request)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    seed = tl.load(seeds_ptr + row)
    offset = tl.load(offsets_ptr + row)
    start = split * share
    end = tl.minimum(start + share, vocab)
    place = tl.arange(0, BLOCK_COUNT)
    # Places past COUNT are never the least. Empty ones have columns of their own.
    best = tl.where(place < COUNT, float("-inf"), float("inf"))
    best_column = vocab + place
    least = tl.min(best, 0)
    for first in range(start, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * vocab + column, mask=column < end, other=float("-inf"))
        key = logits.to(tl.float32) * inverse
        top = tl.max(key, 0)
        if top + MAX_NOISE > least:
            key += gumbel_noise(seed, offset, first, stream, SERIES_BELOW, BLOCK)
            top = tl.max(key, 0)
        while top > least:
            top_column = tl.min(tl.where(key == top, column, vocab), 0)
            # The last of equal keys leaves.
            dropped = best_column == tl.max(tl.where(best == least, best_column, -1), 0)
            best = tl.where(dropped, top, best)
            best_column = tl.where(dropped, top_column, best_column)
            least = tl.min(best, 0)
            key = tl.where(column == top_column, float("-inf"), key)
            top = tl.max(key, 0)
    out = (tl.program_id(0).to(tl.int64) * SPLITS + split) * COUNT + place
    tl.store(keys_ptr + out, best, mask=place < COUNT)
    tl.store(columns_ptr + out, best_column, mask=place < COUNT)


@triton.jit
def _merge_keys_kernel(
    keys_ptr,
    columns_ptr,
    ids_ptr,
    drawn_ptr,
    weights_ptr,
    tokens_ptr,
    probs_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    COUNT: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    # Programs: (request, slot).
    request = tl.program_id(0).to(tl.int64)
    if tl.load(drawn_ptr + request) == 0:
        return
    slot = tl.program_id(1)
    none: tl.constexpr = 1 << 30
    row = request * K + slot
    u = tl.arange(0, BLOCK_U)
    likeliest = tl.max(
        tl.load(probs_ptr + (row * (N * COUNT) + u) * N, mask=u < COUNT, other=0.0), 0
    )
    level = tl.minimum((likeliest * LEVELS).to(tl.int32), LEVELS - 1)
    tl.debug_barrier()  # no warp writes over what another has yet to read
    kept = tl.arange(0, BLOCK_KEPT)
    key = tl.load(keys_ptr + row * KEPT + kept, mask=kept < KEPT, other=float("-inf"))
    column = tl.load(columns_ptr + row * KEPT + kept, mask=kept < KEPT, other=none)
    draw = tl.zeros((BLOCK_U,), tl.int32)
    draw_key = tl.full((BLOCK_U,), float("-inf"), tl.float32)
    for place in range(COUNT):
        top = tl.max(key, 0)
        top_column = tl.min(tl.where(key == top, column, none), 0)
        draw = tl.where(u == place, top_column, draw)
        draw_key = tl.where(u == place, top, draw_key)
        key = tl.where(column == top_column, float("-inf"), key)
    exists = draw_key > float("-inf")
    weight = tl.load(weights_ptr + level * COUNT + u, mask=exists, other=0.0)
    token = tl.where(exists, draw, 0).to(tl.int64)
    if HAS_IDS:
        token = tl.load(ids_ptr + token, mask=u < COUNT, other=0)
    tl.store(tokens_ptr + row * (N * COUNT) + u, token, mask=u < COUNT)
    j = tl.arange(0, BLOCK_N)
    out = (row * (N * COUNT) + u[:, None]) * N + j[None, :]
    mask = (u < N * COUNT)[:, None] & (j < N)[None, :]
    tl.store(probs_ptr + out, tl.where(j[None, :] == 0, weight[:, None], 0.0), mask=mask)


def slot_draws_triton(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int,
    drawn: torch.Tensor,
    weights: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    splits: Optional[int] = None,
) -> None:
    """Launcher of :func:`slot_draws`; ``splits`` overrides the number of vocabulary splits."""
    batch, draws, slots, vocab = logits.shape
    levels, count = weights.shape
    assert temperatures.shape == drawn.shape == (batch,)
    assert temperatures.dtype == torch.float32 and drawn.dtype == torch.bool
    assert seeds.shape == offsets.shape == (batch * draws * slots,)
    assert seeds.dtype == offsets.dtype == tokens.dtype == torch.int64
    assert weights.dtype == probs.dtype == torch.float32
    assert tokens.shape == (batch, slots, draws * count) and probs.shape == (*tokens.shape, draws)
    assert ids is None or (
        ids.shape == (vocab,) and ids.dtype == torch.int64 and ids.is_contiguous()
    )
    tensors = (logits, temperatures, seeds, offsets, drawn, weights, tokens, probs)
    assert all(x.is_contiguous() for x in tensors)
    rows = batch * slots
    if rows == 0:
        return
    share, splits = split_vocab(rows, vocab, logits.device, splits)
    kept = splits * count
    keys = torch.empty((rows, kept), dtype=torch.float32, device=logits.device)
    columns = torch.empty((rows, kept), dtype=torch.int32, device=logits.device)
    _top_keys_kernel[(rows, splits)](
        logits,
        temperatures,
        seeds,
        offsets,
        drawn,
        keys,
        columns,
        vocab,
        share,
        stream,
        N=draws,
        K=slots,
        SPLITS=splits,
        COUNT=count,
        BLOCK_COUNT=triton.next_power_of_2(count),
        SERIES_BELOW=SERIES_BELOW,
        MAX_NOISE=MAX_NOISE,
        BLOCK=TILE,
        **launch_options(logits.device),
    )
    block_kept = triton.next_power_of_2(kept)
    _merge_keys_kernel[(batch, slots)](
        keys,
        columns,
        ids if ids is not None else tokens,
        drawn,
        weights,
        tokens,
        probs,
        N=draws,
        K=slots,
        KEPT=kept,
        COUNT=count,
        LEVELS=levels,
        HAS_IDS=ids is not None,
        BLOCK_KEPT=block_kept,
        BLOCK_U=triton.next_power_of_2(draws * count),
        BLOCK_N=triton.next_power_of_2(draws),
        num_warps=min(max(block_kept // 512, 1), 8),
        **launch_options(logits.device),
    )


def _fake_slot_draws(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int,
    drawn: torch.Tensor,
    weights: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    splits: Optional[int] = None,
) -> None:
    return None


_slot_draws_op = register_custom_op(
    slot_draws_triton,
    op_name="flashmap_slot_draws",
    mutates_args=["tokens", "probs"],
    fake_impl=_fake_slot_draws,
)


def slot_draws(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int,
    drawn: torch.Tensor,
    weights: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
) -> None:
    """Write each slot's first draws without replacement over the choices of some requests.

    Of a request that asks for draws, ``tokens[b, k, u]`` for ``u < count`` is the draw ``u`` of
    slot ``k`` of candidate 0, the first being what ``sample_draft`` draws for that row; other
    tokens stay. ``probs[b, k, u, 0]`` is ``weights[h, u]`` where there is a draw ``u``, and all
    other ``probs`` are 0, with ``h`` the largest of ``probs[b, k, :count, 0]`` times ``H``, rounded
    down and at most ``H - 1``. The draws end when the columns above -inf do; a token without a
    draw is that of column 0.

    Args:
        logits: ``(B, N, K, V)`` float32, bfloat16 or float16, contiguous; -inf leaves a column out.
        ids: ``(V,)`` int64, the token id of each column of a restricted vocabulary; None when
            they coincide.
        temperatures: ``(B,)`` float32, of candidate 0; a request at 0 is taken at 1.
        seeds, offsets: ``(B N K,)`` int64, of the rows of ``logits`` as ``sample_draft`` has them.
        stream: as there.
        drawn: ``(B,)`` bool; requests that are false keep their ``tokens`` and ``probs``.
        weights: ``(H, count)`` float32, what a slot's draws are grown by where its likeliest token
            has a likelihood from ``h / H`` on; must not depend on draws.
        tokens: ``(B, K, U)`` int64, ``U = N count``, written.
        probs: ``(B, K, U, N)`` float32, as ``slot_choices`` returns them, written over.
    """
    implementation = _slot_draws_op if logits.is_cuda else slot_draws_torch
    implementation(logits, ids, temperatures, seeds, offsets, stream, drawn, weights, tokens, probs)
