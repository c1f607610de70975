"""Plans a request's verify tree: the prefixes that most of its candidate blocks share.

The ``N`` candidates of a request are ``N`` independent samples of its next ``K`` tokens. Their trie
has a node per distinct prefix, and a node's votes, the candidates that pass through it, estimate
the prefix's probability under the draft. The ``W - 1`` nodes with most votes are kept beside the
root, ties going to the smaller depth, then to the smaller candidate. Votes never grow with depth,
so this order lists parents first and keeps the parents of whatever it keeps. Scores, where given,
rank nodes of equal votes before their depth does; most nodes have one vote. Candidates of a draft
that hardly looks at its noise are all the same: :mod:`.tree_growth` grows a tree from what a draft
says of each slot instead, and has what was measured.

One program plans one request. What makes that short:

1. Candidate ``n`` shares its longest prefix with some earlier candidate ``m``; call its length
   ``start``. Exactly the slots from ``start`` on are nodes that ``n`` is the first to reach; they
   form one branch, which hangs on the node of ``m`` (the first such one) at slot ``start - 1``. So
   ``N`` comparisons of a ``(N, K)`` tile with one candidate give votes, nodes and parents at once.
2. A node's votes, depth, candidate and parent's candidate fit in one int32, whose order is the
   order above: keeping the best is a top-k of plain integers, and a sorted key is the whole node.
3. Ancestors are the kept nodes whose prefix the node's candidate has, links are minima over a
   ``(W, W)`` tile: all of it stays in registers.

A request's rows are ``8 N K`` bytes in and ``W (W + 32)`` out, 1.0 KB and 0.8 KB for ``N=8, K=16,
W=17``: nothing a memory system would notice. The time is that of a chain of dependent instructions
in one program, so small trees get one warp, whose reductions need no barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import List, Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.srt.utils.custom_op import register_custom_op

MAX_CANDIDATES = 64
MAX_SLOTS = 32
MAX_WIDTH = 129

# A node's key, from the highest bit: votes 7, (score 31,) deepest slot - slot 5, last candidate -
# candidate 6, parent's candidate 6. A score is a float32 of sign 0, whose bits order as it does.
_SCORE_BITS = 31
_SLOT_BITS = 5
_CANDIDATE_BITS = 6


@dataclass(frozen=True)
class TreePlan:
    """Verify trees of ``B`` requests, node 0 being the anchor; siblings ascend by node index."""

    tokens: torch.Tensor
    """``(B, W)`` int64; 0 at padding, which no link reaches."""
    parents: torch.Tensor
    """``(B, W)`` int32, below the node's own index; -1 for the root and padding."""
    depths: torch.Tensor
    """``(B, W)`` int32; 0 for the root and padding."""
    mask: torch.Tensor
    """``(B, W, W)`` bool; row ``i`` attends its ancestors and itself, padding itself alone."""
    first_child: torch.Tensor
    """``(B, W)`` int64; -1 for none."""
    next_sibling: torch.Tensor
    """``(B, W)`` int64; -1 for none."""
    counts: torch.Tensor
    """``(B, 3)`` int32: the three below, which go to the host together."""

    @property
    def num_nodes(self) -> torch.Tensor:
        """``(B,)`` int32, nodes that are not padding, the root included."""
        return self.counts[:, 0]

    @property
    def trie_nodes(self) -> torch.Tensor:
        """``(B,)`` int32, distinct prefixes before the cut to ``W - 1``."""
        return self.counts[:, 1]

    @property
    def distinct(self) -> torch.Tensor:
        """``(B,)`` int32, distinct candidates."""
        return self.counts[:, 2]

    @classmethod
    def empty(cls, batch: int, width: int, device: torch.device) -> TreePlan:
        """Buffers to plan into."""

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(batch, *shape, dtype=dtype, device=device)

        return cls(
            tokens=new(width, dtype=torch.int64),
            parents=new(width),
            depths=new(width),
            mask=new(width, width, dtype=torch.bool),
            first_child=new(width, dtype=torch.int64),
            next_sibling=new(width, dtype=torch.int64),
            counts=new(3),
        )

    def tensors(self) -> list[torch.Tensor]:
        """The fields in order."""
        return [getattr(self, field.name) for field in fields(self)]


def _least(values: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Smallest of ``values`` marked in the last dimension of ``among``, -1 where none is."""
    limit = torch.iinfo(values.dtype).max
    least = values.masked_fill(~among, limit).amin(dim=-1)
    return torch.where(least == limit, -1, least)


def tree_links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``first_child`` and ``next_sibling`` of a :class:`TreePlan`'s ``parents``, in torch."""
    node = torch.arange(parents.shape[1], device=parents.device)
    is_child = parents[:, None, :] == node[:, None]
    is_later_sibling = (parents[:, None, :] == parents[:, :, None]) & (node > node[:, None])
    is_later_sibling &= (parents >= 0)[:, :, None]
    node = node.expand_as(is_child)
    return _least(node, is_child), _least(node, is_later_sibling)


def plan_tree_torch(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    width: int,
    chain: torch.Tensor,
    scores: Optional[torch.Tensor] = None,
) -> TreePlan:
    """Reference of :func:`plan_tree`."""
    _, num_candidates, num_slots = candidates.shape
    device = candidates.device
    # same (B, N, N, K): two candidates agree up to and including a slot.
    same = (candidates[:, :, None] == candidates[:, None]).cumprod(dim=-1)
    votes, owner = same.sum(dim=2), same.argmax(dim=2)
    candidate = torch.arange(num_candidates, device=device)[:, None]
    slot = torch.arange(num_slots, device=device)
    # A prefix is the node of the first candidate that has it.
    real = (owner == candidate) & (~chain[:, None, None] | (candidate == 0))
    key = votes
    if scores is not None:
        least = scores.cummin(dim=-1).values.clamp_min(0)
        key = (key << _SCORE_BITS) | least.contiguous().view(torch.int32)
    key = (key * num_slots + (num_slots - 1 - slot)) * num_candidates
    key = (key + (num_candidates - 1 - candidate)).masked_fill(~real, -1).flatten(1)
    key = F.pad(key, (0, max(width - 1 - key.shape[1], 0)), value=-1)
    key, index = (x[:, : width - 1] for x in key.sort(dim=1, descending=True))
    kept = key >= 0
    index = index.masked_fill(~kept, 0)
    node_candidate, node_slot = index // num_slots, index % num_slots

    # attends (B, W - 1, W - 1): row's candidate has column's prefix, and reaches as far.
    owner_rows = owner.gather(1, node_candidate[:, :, None].expand(-1, -1, num_slots))
    owners = owner_rows.gather(2, node_slot[:, None, :].expand(-1, width - 1, -1))
    attends = (owners == node_candidate[:, None, :]) & kept[:, :, None] & kept[:, None, :]
    attends &= node_slot[:, None, :] <= node_slot[:, :, None]
    above = attends & (node_slot[:, None, :] + 1 == node_slot[:, :, None])
    node = torch.arange(1, width, device=device)
    parents = (above * node).sum(dim=-1)
    padding = torch.eye(width - 1, dtype=torch.bool, device=device) & ~kept[:, :, None]
    mask = F.pad(attends | padding, (1, 0, 1, 0))
    mask[:, 1:, 0] = kept
    mask[:, 0, 0] = True

    counts = (1 + kept.sum(dim=1), real.sum(dim=(1, 2)), real[:, :, -1].sum(dim=1))
    parents = F.pad(parents.masked_fill(~kept, -1), (1, 0), value=-1)
    first_child, next_sibling = tree_links(parents)
    return TreePlan(
        tokens=torch.cat((anchors[:, None], candidates.flatten(1).gather(1, index) * kept), dim=1),
        parents=parents.int(),
        depths=F.pad((node_slot + 1) * kept, (1, 0)).int(),
        mask=mask,
        first_child=first_child,
        next_sibling=next_sibling,
        counts=torch.stack(counts, dim=1).int(),
    )


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _plan_tree_kernel(
    anchors_ptr,
    candidates_ptr,
    chain_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    mask_ptr,
    first_child_ptr,
    next_sibling_ptr,
    counts_ptr,
    scores_ptr,
    HAS_SCORES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    SCORE_BITS: tl.constexpr,
    SLOT_BITS: tl.constexpr,
    CANDIDATE_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    last_slot: tl.constexpr = (1 << SLOT_BITS) - 1
    last_candidate: tl.constexpr = (1 << CANDIDATE_BITS) - 1
    request = tl.program_id(0).to(tl.int64)
    candidates_ptr += request * (N * K)
    is_tree = tl.load(chain_ptr + request) == 0

    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    offset = n[:, None] * K + k[None, :]
    block = tl.load(candidates_ptr + offset, mask=inside, other=0)
    votes = tl.zeros((BLOCK_N, BLOCK_K), tl.int32)
    start = tl.zeros((BLOCK_N,), tl.int32)
    branch = tl.zeros((BLOCK_N,), tl.int32)
    for m in range(N):
        other = tl.load(candidates_ptr + m * K + k, mask=k < K, other=0)
        shared = tl.min(tl.where(block == other[None, :], BLOCK_K, k[None, :]), 1)
        votes += (k[None, :] < shared[:, None]).to(tl.int32)
        closer = (m < n) & (shared > start)
        start = tl.where(closer, shared, start)
        branch = tl.where(closer, m, branch)
    real = inside & (k[None, :] >= start[:, None]) & ((n == 0)[:, None] | is_tree)
    above = tl.where(k[None, :] > start[:, None], n[:, None], branch[:, None])
    key = votes
    if HAS_SCORES:
        scores = tl.load(scores_ptr + request * (N * K) + offset, mask=inside, other=0.0)
        scores = tl.maximum(tl.associative_scan(scores, 1, _smaller), 0.0)
        key = (key.to(tl.int64) << SCORE_BITS) | scores.to(tl.int32, bitcast=True)
    key = (key << SLOT_BITS) | (last_slot - k)[None, :]
    key = (key << CANDIDATE_BITS) | (last_candidate - n)[:, None]
    key = tl.where(real, (key << CANDIDATE_BITS) | above, -1)
    # The reshape may reorder: a key knows its place.
    key = tl.topk(tl.reshape(key, (BLOCK_N * BLOCK_K,), can_reorder=True), BLOCK_NODES)
    kept = key >= 0
    key = key.to(tl.int32)  # the score has served; the bits below it are left

    # The node of key i has index i + 1.
    i = tl.arange(0, BLOCK_NODES)
    inside_plan = i < W - 1
    kept &= inside_plan
    # -1 is no parent's candidate: padding then has no parent among the nodes.
    above_candidate = tl.where(kept, key & last_candidate, -1)
    candidate = last_candidate - ((key >> CANDIDATE_BITS) & last_candidate)
    slot = last_slot - ((key >> (2 * CANDIDATE_BITS)) & last_slot)

    is_parent = (candidate[None, :] == above_candidate[:, None]) & kept[None, :]
    is_parent &= slot[None, :] + 1 == slot[:, None]
    parent = tl.sum(tl.where(is_parent, i[None, :] + 1, 0), 1)
    parent = tl.where(kept, parent, -1)

    same = kept[:, None] & kept[None, :]
    attends = i[:, None] == i[None, :]
    # Both views of the nodes' candidates are loaded rather than one transposed K times.
    row_ptr = candidates_ptr + candidate[:, None] * K
    column_ptr = candidates_ptr + candidate[None, :] * K
    for depth in range(K):
        row = tl.load(row_ptr + depth, mask=kept[:, None], other=0)
        column = tl.load(column_ptr + depth, mask=kept[None, :], other=0)
        same &= row == column
        attends |= same & (slot == depth)[None, :] & (slot >= depth)[:, None]

    none: tl.constexpr = 1 << 30
    follows = tl.where(parent[None, :] == i[:, None] + 1, i[None, :] + 1, none)
    first_child = tl.min(follows, 1)
    later = (parent[None, :] == parent[:, None]) & (i[None, :] > i[:, None]) & kept[:, None]
    next_sibling = tl.min(tl.where(later, i[None, :] + 1, none), 1)

    token = tl.load(candidates_ptr + candidate * K + slot, mask=kept, other=0)
    node = request * W + 1 + i
    tl.store(tokens_ptr + node, token, mask=inside_plan)
    tl.store(parents_ptr + node, parent, mask=inside_plan)
    tl.store(depths_ptr + node, tl.where(kept, slot + 1, 0), mask=inside_plan)
    first_child = tl.where(first_child == none, -1, first_child).to(tl.int64)
    tl.store(first_child_ptr + node, first_child, mask=inside_plan)
    next_sibling = tl.where(next_sibling == none, -1, next_sibling).to(tl.int64)
    tl.store(next_sibling_ptr + node, next_sibling, mask=inside_plan)
    mask_rows = mask_ptr + node * W
    tl.store(
        mask_rows[:, None] + 1 + i[None, :],
        attends,
        mask=inside_plan[:, None] & inside_plan[None, :],
    )
    tl.store(mask_rows, kept, mask=inside_plan)

    # The root; the node of most votes hangs on it and comes first.
    root = request * W
    tl.store(tokens_ptr + root, tl.load(anchors_ptr + request))
    tl.store(parents_ptr + root, -1)
    tl.store(depths_ptr + root, 0)
    tl.store(first_child_ptr + root, 1)
    tl.store(next_sibling_ptr + root, -1)
    tl.store(mask_ptr + root * W, 1)
    tl.store(mask_ptr + root * W + 1 + i, i < 0, mask=inside_plan)
    counts_ptr += 3 * request
    tl.store(counts_ptr, 1 + tl.sum(kept.to(tl.int32), 0))
    nodes = real.to(tl.int32)
    tl.store(counts_ptr + 1, tl.sum(tl.sum(nodes, 1), 0))
    leaves = tl.where((k == K - 1)[None, :], nodes, 0)
    tl.store(counts_ptr + 2, tl.sum(tl.sum(leaves, 1), 0))


def plan_tree_triton(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    chain: torch.Tensor,
    out: List[torch.Tensor],
    scores: Optional[torch.Tensor] = None,
) -> None:
    """Launcher of :func:`plan_tree`; ``out`` holds the tensors of a :class:`TreePlan`."""
    batch, num_candidates, num_slots = candidates.shape
    width = out[0].shape[1]
    assert all(x.is_contiguous() for x in (anchors, candidates, chain, *out))
    assert scores is None or scores.is_contiguous()
    if batch == 0:
        return
    block_k = triton.next_power_of_2(num_slots)
    block_nodes = max(triton.next_power_of_2(width - 1), 2)  # top-k wants two
    block_n = max(triton.next_power_of_2(num_candidates), block_nodes // block_k)
    largest_tile = max(block_n * block_k, block_nodes * block_nodes)
    _plan_tree_kernel[(batch,)](
        anchors,
        candidates,
        chain,
        *out,
        scores if scores is not None else candidates,
        HAS_SCORES=scores is not None,
        N=num_candidates,
        K=num_slots,
        W=width,
        SCORE_BITS=_SCORE_BITS,
        SLOT_BITS=_SLOT_BITS,
        CANDIDATE_BITS=_CANDIDATE_BITS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_NODES=block_nodes,
        num_warps=min(max(largest_tile // 512, 1), 16),
        **launch_options(candidates.device),
    )


def _fake_plan_tree(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    chain: torch.Tensor,
    out: List[torch.Tensor],
    scores: Optional[torch.Tensor] = None,
) -> None:
    return None


_plan_tree_op = register_custom_op(
    plan_tree_triton,
    op_name="flashmap_plan_tree",
    mutates_args=["out"],
    fake_impl=_fake_plan_tree,
)


def plan_tree(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    width: int,
    chain: torch.Tensor,
    *,
    scores: torch.Tensor | None = None,
    out: TreePlan | None = None,
) -> TreePlan:
    """The verify trees of ``B`` requests; fixed shapes, nothing waits for the device.

    Args:
        anchors: ``(B,)`` int64, the tokens of the roots.
        candidates: ``(B, N, K)`` int64 token ids after the anchors, contiguous; ``N`` up to 64,
            ``K`` up to 32.
        width: ``W``, 2 to 129. Nodes that a smaller trie leaves free are padding.
        chain: ``(B,)`` bool; True plans candidate 0 alone: nodes ``1 ... min(K, W - 1)`` are
            its slots in order.
        scores: ``(B, N, K)`` float32, how likely a candidate's prefix up to each slot is; ranks
            nodes of equal votes, higher first, before their depth. Negative scores count as 0,
            and no score as more than those of the slots before it.
        out: buffers to write and return, of :meth:`TreePlan.empty`; new ones when None.
    """
    batch, num_candidates, num_slots = candidates.shape
    assert 1 <= num_candidates <= MAX_CANDIDATES and 1 <= num_slots <= MAX_SLOTS
    assert 2 <= width <= MAX_WIDTH
    assert anchors.shape == chain.shape == (batch,)
    assert anchors.dtype == candidates.dtype == torch.int64 and chain.dtype == torch.bool
    if scores is not None:
        assert scores.shape == candidates.shape and scores.dtype == torch.float32
    if out is None:
        out = TreePlan.empty(batch, width, candidates.device)
    assert out.tokens.shape == (batch, width)
    if candidates.is_cuda:
        _plan_tree_op(anchors, candidates, chain, out.tensors(), scores)
    else:
        plan = plan_tree_torch(anchors, candidates, width, chain, scores)
        for buffer, values in zip(out.tensors(), plan.tensors(), strict=True):
            buffer.copy_(values)
    return out
