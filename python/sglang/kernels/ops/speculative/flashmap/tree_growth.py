"""Grows a request's verify tree best first: the likeliest prefixes under its draws of noise.

Given its noise, a draft's slots are independent, so ``N`` draws make a prefix as likely as

    s(x_1 … x_k) = 1/N Σ_j Π_{i ≤ k} q_j,i(x_i),

which votes of sampled candidates (:mod:`.tree`) only estimate. A continuation is never likelier
than its prefix, so taking the likeliest continuation of what is already in the tree, ``W - 1``
times, gives the ``W - 1`` likeliest prefixes, parents first. Tokens other than the likeliest few of
a slot are left out, which is the only approximation. One draw is enough to grow a tree.

What it gives depends on what the draft does with its noise. The draft shipped for the demo target
was trained on one jump by cross-entropy and hardly looks at it: 8 draws have the same likeliest
block. Accepted drafts of greedy texts (`benchmark/flashmap/tree_scores.py`, 219 drafts of 8 slots,
``W = 17``): chain 1.37; votes of 8 likeliest blocks 1.37, of 8 blocks sampled at temperature 0.5
1.85; grown 2.10, of one draw as of 8.

Grown from probabilities, the tree is a deterministic function of the draft and not a sample of it:
it serves the rules that draw the target's token at every node and follow it. Grown from weights
that say nothing of the tokens (``plan.draw_weights``) over lists of draws (:mod:`.slot_draws`), it
is a sample, and serves rejection.

One program grows one request's tree. It keeps each node's best continuation that is not in the tree
yet; a step takes the best of these, then works out the next best of its parent and the best of the
new node, ``U N`` products each. A step needs the one before, so the time is that of ``W - 1`` short
chains of dependent instructions; ``4 K U N`` bytes are read, most of them several times, from the
L1 cache.
"""

from __future__ import annotations

from typing import List, Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.tree import (
    MAX_SLOTS,
    MAX_WIDTH,
    TreePlan,
    tree_links,
)
from sglang.srt.utils.custom_op import register_custom_op

MAX_CHOICES = 64


def grow_tree_torch(
    anchors: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    blocks: torch.Tensor | None,
    width: int,
    chain: torch.Tensor | None,
) -> TreePlan:
    """Reference of :func:`grow_tree`."""
    batch, num_slots, num_choices, draws = probs.shape
    row = torch.arange(batch, device=probs.device)

    def continuations(weights: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        """Likelihoods ``(B, U)`` one slot on from prefixes of ``weights (B, N)``; -1 at the end."""
        slot = depth.clamp_max(num_slots - 1)
        likely = (probs[row, slot] * weights[:, None]).sum(dim=-1) / draws
        return likely.masked_fill((depth == num_slots)[:, None], -1)

    # open (B, W, U): continuations of each node that are not in the tree.
    open_ = probs.new_full((batch, width, num_choices), -1)
    weights = probs.new_ones(batch, width, draws)
    parents = torch.full((batch, width), -1, device=probs.device)
    depths = torch.zeros_like(parents)
    node_tokens = torch.zeros_like(parents)
    node_tokens[:, 0] = anchors
    open_[:, 0] = continuations(weights[:, 0], depths[:, 0])
    for node in range(1, width):
        best, index = open_.flatten(1).max(dim=1)
        grown = best > 0
        parent, choice = index // num_choices, index % num_choices
        slot = depths[row, parent].clamp_max(num_slots - 1)
        parents[:, node] = torch.where(grown, parent, -1)
        depths[:, node] = torch.where(grown, slot + 1, 0)
        node_tokens[:, node] = torch.where(grown, tokens[row, slot, choice], 0)
        weights[:, node] = weights[row, parent] * probs[row, slot, choice]
        open_[row, parent, choice] = -1
        on = continuations(weights[:, node], depths[:, node])
        open_[:, node] = torch.where(grown[:, None], on, -1)

    node = torch.arange(width, device=probs.device)
    if chain is not None:
        length = min(num_slots, width - 1)
        drafted = (node > 0) & (node <= length)
        drafts = F.pad(blocks[:, :length], (1, width - 1 - length))
        drafts[:, 0] = anchors
        chain = chain[:, None]
        node_tokens = torch.where(chain, drafts, node_tokens)
        parents = torch.where(chain, torch.where(drafted, node - 1, -1), parents)
        depths = torch.where(chain, node * drafted, depths)

    # mask (B, W, W): a node's row is itself and, once per level, one more ancestor.
    ancestors = [node.expand_as(parents)]
    for _ in range(num_slots):
        above = parents.gather(1, ancestors[-1].clamp_min(0))
        ancestors.append(torch.where(ancestors[-1] >= 0, above, -1))
    mask = (torch.stack(ancestors, dim=-1)[:, :, None] == node[:, None]).any(dim=-1)
    first_child, next_sibling = tree_links(parents)
    num_nodes = 1 + (parents >= 0).sum(dim=1)
    leaves = (first_child < 0) & (parents >= 0)
    return TreePlan(
        tokens=node_tokens,
        parents=parents.int(),
        depths=depths.int(),
        mask=mask,
        first_child=first_child,
        next_sibling=next_sibling,
        counts=torch.stack((num_nodes, num_nodes - 1, leaves.sum(dim=1)), dim=1).int(),
    )


@triton.jit
def _continuations(
    probs_ptr, weights, depth, u, j, K: tl.constexpr, U: tl.constexpr, N: tl.constexpr
):
    """Likelihoods ``(BLOCK_U,)`` one slot on from the prefix of ``weights (1, BLOCK_N)``."""
    mask = (u < U)[:, None] & (j < N)[None, :] & (depth < K)
    probs = tl.load(probs_ptr + depth * (U * N) + u[:, None] * N + j[None, :], mask=mask, other=0.0)
    return tl.sum(probs * weights, 1) / N


@triton.jit
def _first_max(values, index, NONE: tl.constexpr):
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, index, NONE), 0)


@triton.jit
def _grow_tree_kernel(
    anchors_ptr,
    choices_ptr,
    probs_ptr,
    blocks_ptr,
    chain_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    mask_ptr,
    first_child_ptr,
    next_sibling_ptr,
    counts_ptr,
    K: tl.constexpr,
    U: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHAINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    none: tl.constexpr = 1 << 30
    one = tl.full((), 1, tl.int64)
    request = tl.program_id(0).to(tl.int64)
    choices_ptr += request * (K * U)
    probs_ptr += request * (K * U * N)
    is_chain = False
    if CHAINS:
        is_chain = tl.load(chain_ptr + request) != 0

    i = tl.arange(0, BLOCK_W)
    u = tl.arange(0, BLOCK_U)
    j = tl.arange(0, BLOCK_N)
    inside = i < W
    token = tl.where(i == 0, tl.load(anchors_ptr + request), 0)
    parent = tl.full((BLOCK_W,), -1, tl.int32)
    depth = tl.zeros((BLOCK_W,), tl.int32)
    size = tl.full((), 1, tl.int32)
    if is_chain:
        drafted = (i > 0) & (i <= K) & inside
        token += tl.load(blocks_ptr + request * K + i - 1, mask=drafted, other=0)
        parent = tl.where(drafted, i - 1, -1)
        depth = tl.where(drafted, i, 0)
        size += tl.sum(drafted.to(tl.int32), 0)
    else:
        # Of every node: its products, its continuations in the tree (bits), the best of the rest.
        taken = tl.zeros((BLOCK_W,), tl.int64)
        weights = tl.zeros((BLOCK_W, BLOCK_N), tl.float32) + 1.0
        likely = _continuations(
            probs_ptr, tl.zeros((1, BLOCK_N), tl.float32) + 1.0, 0, u, j, K, U, N
        )
        first, choice = _first_max(likely, u, none)
        best = tl.where(i == 0, first, 0.0)
        best_choice = tl.where(i == 0, choice, 0)
        for node in range(1, W):
            likelihood, above = _first_max(best, i, none)
            if likelihood > 0:
                at_above = i == above
                choice = tl.sum(tl.where(at_above, best_choice, 0), 0)
                slot = tl.sum(tl.where(at_above, depth, 0), 0)
                taken |= tl.where(at_above, one << choice, 0)
                above_taken = tl.sum(tl.where(at_above, taken, 0), 0)
                above_weights = tl.sum(tl.where(at_above[:, None], weights, 0.0), 0)[None, :]
                chosen_probs = probs_ptr + (slot * U + choice) * N + j[None, :]
                new_weights = above_weights * tl.load(
                    chosen_probs, mask=(j < N)[None, :], other=0.0
                )
                new = i == node
                weights = tl.where(new[:, None], new_weights, weights)
                token = tl.where(new, tl.load(choices_ptr + slot * U + choice), token)
                parent = tl.where(new, above, parent)
                depth = tl.where(new, slot + 1, depth)
                size += 1
                likely = _continuations(probs_ptr, above_weights, slot, u, j, K, U, N)
                likely = tl.where((above_taken >> u) & 1 == 0, likely, 0.0)
                first, choice = _first_max(likely, u, none)
                best = tl.where(at_above, first, best)
                best_choice = tl.where(at_above, choice, best_choice)
                likely = _continuations(probs_ptr, new_weights, slot + 1, u, j, K, U, N)
                first, choice = _first_max(likely, u, none)
                best = tl.where(new, first, best)
                best_choice = tl.where(new, choice, best_choice)

    attends = i[:, None] == i[None, :]
    ancestor = parent
    for _ in range(K):
        is_ancestor = ancestor[:, None] == i[None, :]
        attends |= is_ancestor
        ancestor = tl.sum(tl.where(is_ancestor, parent[None, :] + 1, 0), 1) - 1
    is_child = parent[None, :] == i[:, None]
    first_child = tl.min(tl.where(is_child, i[None, :], none), 1)
    later = (parent[None, :] == parent[:, None]) & (i[None, :] > i[:, None])
    later &= (parent >= 0)[:, None]
    next_sibling = tl.min(tl.where(later, i[None, :], none), 1)
    leaves = (first_child == none) & (parent >= 0)

    node = request * W + i
    tl.store(tokens_ptr + node, token, mask=inside)
    tl.store(parents_ptr + node, parent, mask=inside)
    tl.store(depths_ptr + node, depth, mask=inside)
    first_child = tl.where(first_child == none, -1, first_child).to(tl.int64)
    tl.store(first_child_ptr + node, first_child, mask=inside)
    next_sibling = tl.where(next_sibling == none, -1, next_sibling).to(tl.int64)
    tl.store(next_sibling_ptr + node, next_sibling, mask=inside)
    attended = mask_ptr + node[:, None] * W + i[None, :]
    tl.store(attended, attends, mask=inside[:, None] & inside[None, :])
    counts_ptr += 3 * request
    tl.store(counts_ptr, size)
    tl.store(counts_ptr + 1, size - 1)
    tl.store(counts_ptr + 2, tl.sum(leaves.to(tl.int32), 0))


def grow_tree_triton(
    anchors: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    blocks: Optional[torch.Tensor],
    chain: Optional[torch.Tensor],
    out: List[torch.Tensor],
) -> None:
    """Launcher of :func:`grow_tree`; ``out`` holds the tensors of a :class:`TreePlan`."""
    batch, num_slots, num_choices, draws = probs.shape
    width = out[0].shape[1]
    given = (x for x in (anchors, tokens, probs, blocks, chain, *out) if x is not None)
    assert all(x.is_contiguous() for x in given)
    if batch == 0:
        return
    block_u, block_n, block_w = (triton.next_power_of_2(x) for x in (num_choices, draws, width))
    largest_tile = max(block_u * block_n, block_w * block_n, block_w * block_w)
    _grow_tree_kernel[(batch,)](
        anchors,
        tokens,
        probs,
        blocks,
        chain,
        *out,
        K=num_slots,
        U=num_choices,
        N=draws,
        W=width,
        BLOCK_U=block_u,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        CHAINS=chain is not None,
        num_warps=min(max(largest_tile // 1024, 1), 16),
        **launch_options(probs.device),
    )


def _fake_grow_tree(
    anchors: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    blocks: Optional[torch.Tensor],
    chain: Optional[torch.Tensor],
    out: List[torch.Tensor],
) -> None:
    return None


_grow_tree_op = register_custom_op(
    grow_tree_triton,
    op_name="flashmap_grow_tree",
    mutates_args=["out"],
    fake_impl=_fake_grow_tree,
)


def grow_tree(
    anchors: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    blocks: torch.Tensor | None,
    width: int,
    chain: torch.Tensor | None,
    *,
    out: TreePlan | None = None,
) -> TreePlan:
    """The verify trees of ``B`` requests; fixed shapes, nothing waits for the device.

    Args:
        anchors: ``(B,)`` int64, the tokens of the roots.
        tokens: ``(B, K, U)`` int64, the tokens that slot ``k`` may hold; ``U`` up to 64, ``K`` up
            to 32.
        probs: ``(B, K, U, N)`` float32, how likely each of ``N`` draws of noise makes them; 0 for
            tokens that are listed twice but for once. Prefixes of likelihood 0 are not grown.
        blocks: ``(B, K)`` int64, the drafts of chains; not read if ``chain`` is None.
        width: ``W``, 2 to 129. Nodes that are not grown are padding.
        chain: ``(B,)`` bool; True plans ``blocks`` instead: nodes ``1 ... min(K, W - 1)`` are its
            slots in order. None: no request's.
        out: buffers to write and return, of :meth:`TreePlan.empty`; new ones when None.

    Returns:
        A :class:`TreePlan`, nodes by falling likelihood; ``trie_nodes`` counts the nodes without
        the root, ``distinct`` the leaves.
    """
    batch, num_slots, num_choices, _ = probs.shape
    assert 1 <= num_choices <= MAX_CHOICES and 1 <= num_slots <= MAX_SLOTS
    assert 2 <= width <= MAX_WIDTH
    assert tokens.shape == probs.shape[:3] and anchors.shape == (batch,)
    assert anchors.dtype == tokens.dtype == torch.int64 and probs.dtype == torch.float32
    if chain is not None:
        assert blocks.shape == (batch, num_slots) and blocks.dtype == torch.int64
        assert chain.shape == (batch,) and chain.dtype == torch.bool
    if out is None:
        out = TreePlan.empty(batch, width, probs.device)
    assert out.tokens.shape == (batch, width)
    if probs.is_cuda:
        _grow_tree_op(anchors, tokens, probs, blocks, chain, out.tensors())
    else:
        plan = grow_tree_torch(anchors, tokens, probs, blocks, width, chain)
        for buffer, values in zip(out.tensors(), plan.tensors(), strict=True):
            buffer.copy_(values)
    return out
