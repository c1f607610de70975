"""Walks a verify tree along the tokens that the target chose.

After verification the target has chosen a token behind every node. The walk starts at the root and
goes on to the child whose token is the one chosen, until no child has it. Siblings have distinct
tokens, so there is at most one way. Along the path the chosen tokens are the output: those that a
child met are the accepted drafts, the last one is the target's own. What else ends a step, the
request's new length and how much of it is new, is known then and written by the same launch.

One program walks one request. A step needs the result of the one before, and a node is looked at
once at most, so the time is that of as many dependent loads, of rows that stay in the L1 cache;
``32 W`` bytes are read at most.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.greedy import (
    LEAST_KEY,
    check_relay,
    chosen_tokens,
    end_step,
    key_token,
    relay_torch,
)
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op

WalkOutputs = Tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


def walk_tree_torch(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    chosen: torch.Tensor,
    lens: torch.Tensor,
    depth: int,
    relay: List[torch.Tensor],
) -> WalkOutputs:
    """Reference of :func:`walk_tree`."""

    def at(values: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        return values.gather(1, node.clamp_min(0))

    chosen = chosen_tokens(chosen)
    # follow (B, W): the child to go on to; all nodes pass over their wrong children in parallel.
    follow = first_child
    while (wrong := (follow >= 0) & (at(tokens, follow) != chosen)).any():
        follow = torch.where(wrong, at(next_sibling, follow), follow)
    node = torch.zeros_like(tokens[:, :1])
    path = [node]
    for _ in range(depth - 1):
        node = torch.where(node >= 0, at(follow, node), -1)
        path.append(node)
    path = torch.cat(path, dim=1)
    num_correct = (path > 0).sum(dim=1)
    committed = at(chosen, path) * (path >= 0)
    bonus = committed.gather(1, num_correct[:, None])[:, 0]
    new_lens = lens + num_correct + 1
    relay_torch(relay, new_lens, bonus)
    return path.int(), num_correct, committed, bonus, (num_correct + 1).int(), new_lens


@triton.jit
def _chosen(chosen_ptr, node, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """The token chosen after ``node``."""
    if SPLITS == 0:  # tokens, not keys
        token = tl.load(chosen_ptr + node)
    else:
        split = tl.arange(0, BLOCK_SPLITS)
        keys = tl.load(chosen_ptr + node * SPLITS + split, mask=split < SPLITS, other=LEAST_KEY)
        token = key_token(tl.max(keys, 0))
    return token


@triton.jit
def _walk_tree_kernel(
    tokens_ptr,
    first_child_ptr,
    next_sibling_ptr,
    chosen_ptr,
    lens_ptr,
    rows_ptr,
    lens_table_ptr,
    token_table_ptr,
    path_ptr,
    num_correct_ptr,
    committed_ptr,
    bonus_ptr,
    commit_lens_ptr,
    new_lens_ptr,
    width,
    chosen_stride,
    HAS_RELAY: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    tokens_ptr += request * width
    first_child_ptr += request * width
    next_sibling_ptr += request * width
    chosen_ptr += request * chosen_stride
    position = tl.arange(0, BLOCK)
    path = tl.where(position == 0, 0, -1)
    num_correct = tl.full((), 0, tl.int64)
    node = tl.full((), 0, tl.int64)
    chosen = _chosen(chosen_ptr, node, SPLITS, BLOCK_SPLITS)
    committed = tl.where(position == 0, chosen, 0)
    child = tl.load(first_child_ptr)
    while (child >= 0) & (num_correct < DEPTH - 1):
        token = tl.load(tokens_ptr + child)
        sibling = tl.load(next_sibling_ptr + child)
        if token == chosen:
            num_correct += 1
            path = tl.where(position == num_correct, child.to(tl.int32), path)
            chosen = _chosen(chosen_ptr, child, SPLITS, BLOCK_SPLITS)
            committed = tl.where(position == num_correct, chosen, committed)
            child = tl.load(first_child_ptr + child)
        else:
            child = sibling
    tl.store(path_ptr + request * DEPTH + position, path, mask=position < DEPTH)
    tl.store(committed_ptr + request * DEPTH + position, committed, mask=position < DEPTH)
    end_step(
        request,
        num_correct,
        chosen,
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


def walk_tree_triton(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    chosen: torch.Tensor,
    lens: torch.Tensor,
    depth: int,
    relay: List[torch.Tensor],
) -> WalkOutputs:
    """Launcher of :func:`walk_tree`."""
    batch, width = tokens.shape
    for x in (tokens, first_child, next_sibling, chosen):
        assert x.shape[:2] == (batch, width) and x.dtype == torch.int64 and x.is_contiguous()
    assert lens.shape == (batch,) and lens.dtype == torch.int64 and lens.is_contiguous()
    check_relay(relay, batch)
    outputs = _fake_walk_tree(tokens, first_child, next_sibling, chosen, lens, depth, relay)
    splits = chosen.shape[2] if chosen.dim() == 3 else 0
    if batch:
        _walk_tree_kernel[(batch,)](
            tokens,
            first_child,
            next_sibling,
            chosen,
            lens,
            *(relay or (lens, lens, lens)),
            *outputs,
            width,
            chosen.stride(0),
            HAS_RELAY=bool(relay),
            SPLITS=splits,
            BLOCK_SPLITS=triton.next_power_of_2(max(splits, 1)),
            DEPTH=depth,
            BLOCK=triton.next_power_of_2(depth),
            num_warps=1,
            **launch_options(tokens.device),
        )
    return outputs


def _fake_walk_tree(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    chosen: torch.Tensor,
    lens: torch.Tensor,
    depth: int,
    relay: List[torch.Tensor],
) -> WalkOutputs:
    batch, device = tokens.shape[0], tokens.device
    path = torch.empty((batch, depth), dtype=torch.int32, device=device)
    num_correct, bonus, new_lens = (torch.empty_like(lens) for _ in range(3))
    committed = torch.empty_like(path, dtype=torch.int64)
    commit_lens = torch.empty_like(lens, dtype=torch.int32)
    return path, num_correct, committed, bonus, commit_lens, new_lens


_walk_tree_op = register_custom_op(
    walk_tree_triton,
    op_name="flashmap_walk_tree",
    mutates_args=["relay"],
    fake_impl=_fake_walk_tree,
)


def walk_tree(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    chosen: torch.Tensor,
    lens: torch.Tensor,
    depth: int,
    relay: Optional[List[torch.Tensor]] = None,
) -> WalkOutputs:
    """The path from each root along ``chosen``; no step waits for the device.

    Args:
        tokens, first_child, next_sibling: ``(B, W)`` int64 of a
            :class:`~sglang.kernels.ops.speculative.flashmap.tree.TreePlan`.
        chosen: the target's token after each node: tokens ``(B, W)`` int64, or keys ``(B, W, S)``
            of ``argmax_keys``; padding's are not read.
        lens: committed tokens before the roots ``(B,)`` int64.
        depth: most nodes on a path, the root included: ``K + 1`` for trees of ``K`` drafts.
        relay: as of ``accept_chain``.

    Returns:
        ``path (B, depth)`` int32, node indices from the root on, -1 after the end;
        ``num_correct (B,)`` int64, the accepted drafts: the nodes of the path but for the root;
        ``committed (B, depth)`` int64, the tokens chosen along the path: accepted drafts, then the
        target's own, 0 after the end; that last token again ``(B,)`` int64; how many tokens are
        committed, the root included, ``(B,)`` int32; and the lengths then ``(B,)`` int64.
    """
    implementation = _walk_tree_op if tokens.is_cuda else walk_tree_torch
    return implementation(tokens, first_child, next_sibling, chosen, lens, depth, relay or [])
