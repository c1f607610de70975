"""The target's first maximum after every row of a verify step, and what a chain of drafts keeps.

A greedy step needs of its logits ``(B · W, V)`` one argmax a row. ``argmax_keys`` reads them once,
as the LM head left them: 16 bits keep the order and the ties of their float32 copies. The
vocabulary is split over programs, all of the GPU for the rows of one request, and a row's splits
are joined where they are read next: by ``accept_chain`` here or by the walk along a tree
(``tree_walk.py``). What is joined are keys,

    key = order(logit) · 2^32 + (2^31 - 1 - column),

``order`` the float's bits as an integer of the same order. The largest key has the largest logit
and of equal ones the first column, as ``torch.argmax`` has it on a CPU and on a GPU: -0 equals +0,
and a NaN is above all else.

``accept_chain`` is the greedy rule on chains and the end of the step in one launch: kept drafts,
the token after them, and the request's new length.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op

_BLOCK = 2048
# What a GPU of 132 multiprocessors holds at a time; a smaller one takes turns.
_PROGRAMS = 1056
# Of a split, so that the last programs to start end with the others.
_MAX_TILES = 8
_COLUMN_MASK = 2**31 - 1
# Below every key.
LEAST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


def key_tokens(keys: torch.Tensor) -> torch.Tensor:
    """Tokens ``(…)`` int64 of keys ``(…, S)``."""
    return _COLUMN_MASK - (keys.amax(dim=-1) & _COLUMN_MASK)


def chosen_tokens(chosen: torch.Tensor) -> torch.Tensor:
    """``chosen (B, W)`` tokens as they are, keys ``(B, W, S)`` as tokens."""
    return chosen if chosen.dim() == 2 else key_tokens(chosen)


def relay_torch(relay: List[torch.Tensor], new_lens: torch.Tensor, bonus: torch.Tensor) -> None:
    """Write to ``relay`` as :func:`accept_chain` says."""
    if relay:
        rows, lens_table, token_table = relay
        lens_table[rows] = new_lens
        token_table[rows] = bonus


def argmax_keys_torch(logits: torch.Tensor) -> torch.Tensor:
    """Reference of :func:`argmax_keys`: one split, whose order is of no importance."""
    return _COLUMN_MASK - logits.argmax(dim=-1, keepdim=True)


@triton.jit
def _argmax_keys_kernel(
    logits_ptr,
    keys_ptr,
    stride,
    vocab,
    share,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    # Programs: (row, split of the vocabulary). A split has `share` columns, whole tiles.
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * share
    end = tl.minimum(start + share, vocab)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    column = start + lane
    for first in range(start, end, BLOCK):
        here = first + lane
        logit = tl.load(logits_ptr + row * stride + here, mask=here < end, other=float("-inf"))
        logit = logit.to(tl.float32)
        above = (logit > best) | ((logit != logit) & (best == best))
        best = tl.where(above, logit, best)
        column = tl.where(above, here, column)
    best = tl.where(best == 0, 0.0, best)  # -0
    bits = best.to(tl.int32, bitcast=True)
    order = tl.where(best != best, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = order.to(tl.int64) * 4294967296 + (0x7FFFFFFF - column).to(tl.int64)
    tl.store(keys_ptr + row * SPLITS + split, tl.max(key, 0))


def argmax_splits(rows: int, vocab: int) -> Tuple[int, int]:
    """In how many splits of how many columns :func:`argmax_keys` reads ``vocab`` columns."""
    tiles = triton.cdiv(vocab, _BLOCK)
    splits = min(max(_PROGRAMS // max(rows, 1), triton.cdiv(tiles, _MAX_TILES)), tiles)
    share = triton.cdiv(tiles, splits) * _BLOCK
    return triton.cdiv(vocab, share), share


def argmax_keys_triton(logits: torch.Tensor) -> torch.Tensor:
    """Launcher of :func:`argmax_keys`."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    keys = _fake_argmax_keys(logits)
    if rows:
        splits, share = argmax_splits(rows, vocab)
        _argmax_keys_kernel[(rows, splits)](
            logits,
            keys,
            logits.stride(0),
            vocab,
            share,
            SPLITS=splits,
            BLOCK=_BLOCK,
            **launch_options(logits.device),
        )
    return keys


def _fake_argmax_keys(logits: torch.Tensor) -> torch.Tensor:
    rows, vocab = logits.shape
    splits, _ = argmax_splits(rows, vocab)
    return torch.empty((rows, splits), dtype=torch.int64, device=logits.device)


_argmax_keys_op = register_custom_op(
    argmax_keys_triton,
    op_name="flashmap_argmax_keys",
    mutates_args=[],
    fake_impl=_fake_argmax_keys,
)


def argmax_keys(logits: torch.Tensor) -> torch.Tensor:
    """Keys ``(R, S)`` int64 of ``logits (R, V)``, whose largest is that of a row's first maximum.

    Args:
        logits: float32, bfloat16 or float16, ``V`` below ``2**31``; columns are contiguous. A NaN
            counts as the maximum; a row at -inf has its first column.

    Returns:
        For :func:`accept_chain` and ``walk_tree``, or :func:`key_tokens`. ``S`` depends on the
        shape alone.
    """
    return (_argmax_keys_op if logits.is_cuda else argmax_keys_torch)(logits)


def accept_chain_torch(
    block: torch.Tensor,
    chosen: torch.Tensor,
    lens: torch.Tensor,
    relay: List[torch.Tensor],
    simulated: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of :func:`accept_chain`."""
    tokens = chosen_tokens(chosen)
    matches = block[:, 1:] == tokens[:, :-1]
    num_correct = matches.to(torch.int64).cumprod(dim=1).sum(dim=1)
    if simulated:
        num_correct = torch.full_like(num_correct, simulated - 1)
    bonus = tokens.gather(1, num_correct[:, None])[:, 0]
    new_lens = lens + num_correct + 1
    relay_torch(relay, new_lens, bonus)
    return tokens, num_correct, bonus, (num_correct + 1).int(), new_lens


@triton.jit
def key_token(key):
    """Of the largest ``key`` of a row's splits, the token."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def end_step(
    request,
    num_correct,
    bonus,
    lens_ptr,
    rows_ptr,
    lens_table_ptr,
    token_table_ptr,
    num_correct_ptr,
    bonus_ptr,
    commit_lens_ptr,
    new_lens_ptr,
    HAS_RELAY: tl.constexpr,
):
    """Store what follows from ``num_correct`` and ``bonus`` of a request."""
    commit_len = num_correct + 1
    new_len = tl.load(lens_ptr + request) + commit_len
    tl.store(num_correct_ptr + request, num_correct)
    tl.store(bonus_ptr + request, bonus)
    tl.store(commit_lens_ptr + request, commit_len)
    tl.store(new_lens_ptr + request, new_len)
    if HAS_RELAY:
        row = tl.load(rows_ptr + request)
        tl.store(lens_table_ptr + row, new_len)
        tl.store(token_table_ptr + row, bonus)


@triton.jit
def _accept_chain_kernel(
    block_ptr,
    chosen_ptr,
    lens_ptr,
    rows_ptr,
    lens_table_ptr,
    token_table_ptr,
    tokens_ptr,
    num_correct_ptr,
    bonus_ptr,
    commit_lens_ptr,
    new_lens_ptr,
    simulated,
    HAS_RELAY: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_WIDTH)
    cell = request * WIDTH + row
    if SPLITS == 0:  # tokens, not keys
        token = tl.load(chosen_ptr + cell, mask=row < WIDTH, other=0)
    else:
        split = tl.arange(0, BLOCK_SPLITS)[None, :]
        mask = (row < WIDTH)[:, None] & (split < SPLITS)
        keys = tl.load(chosen_ptr + cell[:, None] * SPLITS + split, mask=mask, other=LEAST_KEY)
        token = key_token(tl.max(keys, 1))
    # After the last draft there is none that could match.
    draft = tl.load(block_ptr + cell + 1, mask=row < WIDTH - 1, other=-1)
    missed = tl.where((row < WIDTH - 1) & (draft == token), WIDTH - 1, row)
    num_correct = tl.min(tl.where(row < WIDTH, missed, WIDTH - 1), 0)
    num_correct = tl.where(simulated > 0, simulated - 1, num_correct)
    bonus = tl.sum(tl.where(row == num_correct, token, 0), 0)
    tl.store(tokens_ptr + cell, token, mask=row < WIDTH)
    end_step(
        request,
        num_correct,
        bonus,
        lens_ptr,
        rows_ptr,
        lens_table_ptr,
        token_table_ptr,
        num_correct_ptr,
        bonus_ptr,
        commit_lens_ptr,
        new_lens_ptr,
        HAS_RELAY,
    )


def check_relay(relay: List[torch.Tensor], batch: int) -> None:
    """What the kernels assume of ``relay``."""
    if relay:
        rows, lens_table, token_table = relay
        assert rows.shape == (batch,) and lens_table.shape == token_table.shape
        for x in relay:
            assert x.dtype == torch.int64 and x.is_contiguous()


def accept_chain_triton(
    block: torch.Tensor,
    chosen: torch.Tensor,
    lens: torch.Tensor,
    relay: List[torch.Tensor],
    simulated: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launcher of :func:`accept_chain`."""
    batch, width = block.shape
    assert chosen.shape[:2] == (batch, width) and lens.shape == (batch,)
    for x in (block, chosen, lens):
        assert x.dtype == torch.int64 and x.is_contiguous()
    check_relay(relay, batch)
    outputs = _fake_accept_chain(block, chosen, lens, relay)
    splits = chosen.shape[2] if chosen.dim() == 3 else 0
    if batch:
        _accept_chain_kernel[(batch,)](
            block,
            chosen,
            lens,
            *(relay or (lens, lens, lens)),
            *outputs,
            simulated,
            HAS_RELAY=bool(relay),
            SPLITS=splits,
            WIDTH=width,
            BLOCK_SPLITS=triton.next_power_of_2(max(splits, 1)),
            BLOCK_WIDTH=triton.next_power_of_2(width),
            **launch_options(block.device),
        )
    return outputs


def _fake_accept_chain(
    block: torch.Tensor,
    chosen: torch.Tensor,
    lens: torch.Tensor,
    relay: List[torch.Tensor],
    simulated: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_correct, bonus, new_lens = (torch.empty_like(lens) for _ in range(3))
    commit_lens = torch.empty_like(lens, dtype=torch.int32)
    return torch.empty_like(block), num_correct, bonus, commit_lens, new_lens


_accept_chain_op = register_custom_op(
    accept_chain_triton,
    op_name="flashmap_accept_chain",
    mutates_args=["relay"],
    fake_impl=_fake_accept_chain,
)


def accept_chain(
    block: torch.Tensor,
    chosen: torch.Tensor,
    lens: torch.Tensor,
    relay: Optional[List[torch.Tensor]] = None,
    simulated: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The longest prefix of each chain of drafts that the target chose as well.

    Args:
        block: anchors and drafts ``(B, W)`` int64, contiguous.
        chosen: the target's token after each row: keys ``(B, W, S)`` of :func:`argmax_keys`, or
            tokens ``(B, W)``, int64.
        lens: committed tokens before the anchors ``(B,)`` int64.
        relay: where the next step finds its anchors: the requests' rows ``(B,)`` of a table of
            lengths and of one of tokens ``(R,)``, all int64, both of which are written; or None.
        simulated: an accept length, up to ``W``, that replaces the rule in benchmarks; 0: none.

    Returns:
        The target's tokens ``(B, W)`` int64, kept drafts ``(B,)`` int64, the token after them
        ``(B,)`` int64, how many tokens are committed, the anchor included, ``(B,)`` int32, and
        the lengths then ``(B,)`` int64.
    """
    implementation = _accept_chain_op if block.is_cuda else accept_chain_torch
    return implementation(block, chosen, lens, relay or [], simulated)
