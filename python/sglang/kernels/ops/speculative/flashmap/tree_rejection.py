"""Recursive rejection sampling on verify trees whose siblings were drawn without replacement.

The children of a node are draws from one distribution ``q``, each from what those before it left
of it. They are tried in the order they were drawn; each is kept with the probability that makes it,
or what comes after it, a draw from the target's distribution ``p`` (Miao et al. 2024, SpecInfer,
for draws with replacement; without: Chen et al. 2024, Sequoia, arXiv:2402.12374; Jeon et al. 2024,
arXiv:2402.14160). With ``r = p`` and ``s = q`` at first, the rule for a child ``x`` is

    keep ``x`` with probability ``min(1, r(x) / s(x))``; else ``r`` becomes ``max(r - s, 0)`` and
    ``s`` becomes ``s`` without ``x``, both normalised.

Neither distribution is stored. ``s`` is ``c q`` on what is left, ``c`` one over its mass, and since
``max(max(p - a q, 0) - b q, 0) = max(p - (a + b) q, 0)``, ``r`` is ``max(p - T q, 0) / Z`` with two
numbers: ``Z`` its sum, and ``T``, which starts at 0 and grows by ``c Z`` at every rejection. Drawn
tokens need no mask in ``r``: a rejected one has ``u c Z q(x) >= p(x) - T q(x)`` with ``u < 1``, so
that ``r(x)`` is 0 from then on. Their mass is taken off that of ``q`` in float64, for in float32 a
draft that is sure of its first choice would leave rounding errors and nothing else; where less than
``LEAST_MASS`` is left, the children end. To end before a child is looked at is as lossless as not
to have drawn it.

The slots of a block are independent given its noise, so all nodes of a depth hang below draws from
the same ``q``; a path uses those of a depth once. What children a node has must not depend on which
tokens were drawn: places in the tree are given to the first, the second, … draw.

One program follows one request. It reads ``p`` and ``q`` once for every rejected child that has a
sibling left; the mass of ``p`` outside the draft's vocabulary is one less the mass inside.
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

_BLOCK = 4096
# Of `q`, what float64 knows to float32's precision after one less the rest.
LEAST_MASS = tl.constexpr(1e-9)


def reject_tree_torch(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    target: torch.Tensor,
    probs: torch.Tensor,
    ids: Optional[torch.Tensor],
    column_of: Optional[torch.Tensor],
    coins: torch.Tensor,
    depth: int,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of :func:`reject_tree`."""
    batch, width = tokens.shape
    rows = torch.arange(batch, device=tokens.device)
    node, child = torch.zeros_like(rows), first_child[:, 0].clone()
    num_correct = torch.zeros_like(rows)
    path = torch.full((batch, depth), -1, dtype=torch.int32, device=tokens.device)
    path[:, 0] = 0
    taken, scale = torch.zeros_like(coins[:, 0]), torch.ones_like(coins[:, 0])  # T, c Z
    drawn = torch.zeros_like(taken, dtype=torch.float64)  # mass of the rejected siblings
    for _ in range(width):  # each node is looked at once at most
        (row,) = ((child >= 0) & (num_correct < depth - 1)).nonzero(as_tuple=True)
        here, parent, slot = child[row], node[row], num_correct[row]
        token = tokens[row, here]
        column = token if column_of is None else column_of[token].to(torch.int64).clamp_min(0)
        q = probs[row, slot, column]
        if ids is not None:
            q = torch.where(ids[column] == token, q, 0.0)
        left = (target[row, parent, token] - taken[row] * q).clamp_min(0)
        kept = (q > 0) & (coins[row, here] * scale[row] * q < left)
        child[row[~(q > 0)]] = -1

        at, to = row[kept], here[kept]
        num_correct[at] += 1
        path[at, num_correct[at]] = to.int()
        node[at], child[at] = to, first_child[at, to]
        taken[at], scale[at], drawn[at] = 0.0, 1.0, 0.0

        rejected = (q > 0) & ~kept
        at, slot = row[rejected], slot[rejected]
        taken[at] += scale[at]
        drawn[at] += q[rejected].double()
        whole = probs[at, slot]
        mass = whole.double().sum(dim=1) - drawn[at]
        if ids is not None:
            whole = torch.zeros_like(target[at, 0]).index_copy_(1, ids, whole)
        residual = (target[at, parent[rejected]] - taken[at, None] * whole).clamp_min(0)
        size = residual.sum(dim=1)
        scale[at] = (size / mass).float()
        more = (size > 0) & (mass > LEAST_MASS.value)
        child[at] = torch.where(more, next_sibling[at, here[rejected]], -1)
    return path, num_correct, taken


@triton.jit
def _left_over(p_ptr, q_ptr, ids_ptr, taken, columns, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """``Σ max(p - taken · q, 0)`` over the target's vocabulary, and ``Σ q`` in float64."""
    lane = tl.arange(0, BLOCK)
    left = tl.zeros((BLOCK,), tl.float32)
    inside = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, columns, BLOCK):
        column = first + lane
        mask = column < columns
        q = tl.load(q_ptr + column, mask=mask, other=0.0)
        if HAS_IDS:
            column = tl.load(ids_ptr + column, mask=mask, other=0)
        p = tl.load(p_ptr + column, mask=mask, other=0.0)
        left += tl.maximum(p - taken * q, 0.0)
        inside += p
        mass += q.to(tl.float64)
    total = tl.sum(left, 0)
    if HAS_IDS:
        total += tl.maximum(1.0 - tl.sum(inside, 0), 0.0)
    return total, tl.sum(mass, 0)


@triton.jit
def _reject_tree_kernel(
    tokens_ptr,
    first_child_ptr,
    next_sibling_ptr,
    target_ptr,
    probs_ptr,
    ids_ptr,
    column_of_ptr,
    coins_ptr,
    path_ptr,
    num_correct_ptr,
    taken_ptr,
    width,
    vocab,
    slots,
    columns,
    HAS_IDS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    tokens_ptr += request * width
    first_child_ptr += request * width
    next_sibling_ptr += request * width
    coins_ptr += request * width
    target_ptr += request * width * vocab
    probs_ptr += request * slots * columns
    position = tl.arange(0, BLOCK_DEPTH)
    path = tl.where(position == 0, 0, -1)
    num_correct = tl.full((), 0, tl.int64)
    node = tl.full((), 0, tl.int64)
    none = tl.full((), -1, tl.int64)
    taken = tl.full((), 0.0, tl.float32)
    scale = tl.full((), 1.0, tl.float32)
    drawn = tl.full((), 0.0, tl.float64)
    looks = 0  # at a node each, whatever the links are
    child = tl.load(first_child_ptr)
    while (child >= 0) & (num_correct < DEPTH - 1) & (looks < width):
        looks += 1
        p_ptr = target_ptr + node * vocab
        q_ptr = probs_ptr + num_correct * columns
        token = tl.load(tokens_ptr + child)
        column = token
        known = token >= 0
        if HAS_IDS:
            column = tl.maximum(tl.load(column_of_ptr + token).to(tl.int64), 0)
            known = tl.load(ids_ptr + column) == token
        q = tl.load(q_ptr + column, mask=known, other=0.0)
        left = tl.maximum(tl.load(p_ptr + token) - taken * q, 0.0)
        coin = tl.load(coins_ptr + child)
        sibling = tl.load(next_sibling_ptr + child)
        if (q > 0) & (coin * scale * q < left):
            num_correct += 1
            path = tl.where(position == num_correct, child.to(tl.int32), path)
            node = child
            child = tl.load(first_child_ptr + child)
            taken = tl.full((), 0.0, tl.float32)
            scale = tl.full((), 1.0, tl.float32)
            drawn = tl.full((), 0.0, tl.float64)
        elif q > 0:
            taken += scale
            drawn += q.to(tl.float64)
            child = sibling
            if sibling >= 0:
                size, mass = _left_over(p_ptr, q_ptr, ids_ptr, taken, columns, HAS_IDS, BLOCK)
                mass -= drawn
                more = (size > 0) & (mass > LEAST_MASS)
                scale = tl.where(more, size / tl.where(more, mass, 1.0), 0.0).to(tl.float32)
                child = tl.where(more, sibling, none)
        else:
            child = none
    tl.store(path_ptr + request * DEPTH + position, path, mask=position < DEPTH)
    tl.store(num_correct_ptr + request, num_correct)
    tl.store(taken_ptr + request, taken)


def reject_tree_triton(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    target: torch.Tensor,
    probs: torch.Tensor,
    ids: Optional[torch.Tensor],
    column_of: Optional[torch.Tensor],
    coins: torch.Tensor,
    depth: int,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launcher of :func:`reject_tree`."""
    batch, width = tokens.shape
    vocab, (slots, columns) = target.shape[2], probs.shape[1:]
    for x in (tokens, first_child, next_sibling):
        assert x.shape == (batch, width) and x.dtype == torch.int64 and x.is_contiguous()
    for x, shape in ((target, (batch, width, vocab)), (probs, (batch, slots, columns))):
        assert x.shape == shape and x.dtype == torch.float32 and x.is_contiguous()
    assert coins.shape == (batch, width) and coins.dtype == torch.float32 and coins.is_contiguous()
    assert slots >= depth - 1
    if ids is None:
        assert column_of is None and columns == vocab
    else:
        assert ids.shape == (columns,) and ids.dtype == torch.int64 and ids.is_contiguous()
        assert column_of.shape == (vocab,) and column_of.is_contiguous()
    outputs = _fake_reject_tree(
        tokens, first_child, next_sibling, target, probs, ids, column_of, coins, depth
    )
    if batch:
        _reject_tree_kernel[(batch,)](
            tokens,
            first_child,
            next_sibling,
            target,
            probs,
            ids if ids is not None else tokens,
            column_of if column_of is not None else tokens,
            coins,
            *outputs,
            width,
            vocab,
            slots,
            columns,
            HAS_IDS=ids is not None,
            DEPTH=depth,
            BLOCK_DEPTH=triton.next_power_of_2(depth),
            BLOCK=min(triton.next_power_of_2(columns), _BLOCK),
            num_warps=8,
            **launch_options(tokens.device),
        )
    return outputs


def _fake_reject_tree(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    target: torch.Tensor,
    probs: torch.Tensor,
    ids: Optional[torch.Tensor],
    column_of: Optional[torch.Tensor],
    coins: torch.Tensor,
    depth: int,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = tokens.shape[0]
    path = torch.empty((batch, depth), dtype=torch.int32, device=tokens.device)
    num_correct = torch.empty((batch,), dtype=torch.int64, device=tokens.device)
    return path, num_correct, torch.empty_like(num_correct, dtype=torch.float32)


_reject_tree_op = register_custom_op(
    reject_tree_triton,
    op_name="flashmap_reject_tree",
    mutates_args=[],
    fake_impl=_fake_reject_tree,
)


def reject_tree(
    tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    target: torch.Tensor,
    probs: torch.Tensor,
    ids: Optional[torch.Tensor],
    column_of: Optional[torch.Tensor],
    coins: torch.Tensor,
    depth: int,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The drafts that recursive rejection keeps; no step waits for the device.

    Args:
        tokens, first_child, next_sibling: ``(B, W)`` int64; node 0 is the root, links are -1 for
            none. Siblings follow each other in the order they were drawn: without replacement,
            from slot ``d`` of ``probs`` below a node of depth ``d``.
        target: ``p`` after each node ``(B, W, V)`` float32, normalised; rows of nodes that no path
            reaches are not read.
        probs: ``q`` of each slot ``(B, γ, Vd)`` float32, normalised, with ``γ >= depth - 1``.
        ids: token ids ``(Vd,)`` int64 of the columns, None if they coincide; ``Vd`` is ``V`` then.
        column_of: their inverse ``(V,)`` of any integer dtype, or None with ``ids``; tokens outside
            have any column or -1.
        coins: uniform in ``[0, 1)``, one a node, ``(B, W)`` float32.
        depth: most nodes on a path, the root included: ``γ + 1``.

    Returns:
        ``path (B, depth)`` int32, node indices from the root on, -1 after the end;
        ``num_correct (B,)`` int64, its nodes but for the root; and ``T (B,)`` float32 at its last
        node. The token after the path is a draw from ``max(p - T q, 0)``, ``p`` of that node and
        ``q`` of slot ``num_correct``. ``T`` is 0 where nothing was rejected there, so always after
        ``γ`` drafts; where rounding leaves nothing of the residual, ``p`` itself takes its place.
        A child with ``q = 0`` (the draw ran out of tokens) counts as absent, as do those that
        follow it or come when all but ``LEAST_MASS`` of ``q`` is drawn.
    """
    implementation = _reject_tree_op if tokens.is_cuda else reject_tree_torch
    return implementation(
        tokens, first_child, next_sibling, target, probs, ids, column_of, coins, depth
    )
