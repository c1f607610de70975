"""reject_tree: the recursion by the book in float64, the distribution of what is committed, edge
cases, kernel against reference."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.tree_rejection import LEAST_MASS, reject_tree

# (requests, width, slots, target vocabulary, draft vocabulary, tokens with q > 0, sharpness of q)
SHAPES = {
    "usual": (60, 12, 4, 50, 50, 50, 2),
    "draft-vocabulary": (60, 12, 4, 60, 37, 37, 2),
    "few-tokens": (60, 16, 2, 9, 7, 2, 1),
    "sure-drafts": (60, 9, 3, 20, 20, 20, 14),
    "chain": (60, 2, 1, 9, 9, 9, 1),
    "tiles": (3, 12, 3, 9000, 8500, 8500, 0.5),
}
# Parents of the nodes that draws are placed at: the root has three children, the first of them two.
PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4)
SAMPLES, VOCAB, SLOTS = 200_000, 6, 3


def links(parents: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """First children and next siblings, siblings ascending."""
    first, following = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        following[node] = first[parents[node]]
        first[parents[node]] = node
    return first, following


def places(parents: tuple[int, ...]) -> list[tuple[int, int]]:
    """Slot and rank among its siblings of each node but the root."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    ranks = [parents[:node].count(parents[node]) for node in range(len(parents))]
    return [(depths[node] - 1, ranks[node]) for node in range(1, len(parents))]


def draw(probs: torch.Tensor, count: int) -> torch.Tensor:
    """Columns ``(…, count)`` drawn from ``probs (…, Vd)`` without replacement, in order."""
    gumbel = -torch.empty_like(probs, dtype=torch.float64).exponential_().log()
    return (probs.double().log() + gumbel).topk(count, dim=-1).indices


def make(shape: tuple) -> tuple:
    """Arguments of `reject_tree` for a random tree a request."""
    rows, width, slots, vocab, columns, support, sharpness = shape
    ids = column_of = None
    if columns < vocab:
        ids = torch.randperm(vocab)[:columns].sort().values
        column_of = torch.zeros(vocab, dtype=torch.int32)
        column_of[ids] = torch.arange(columns, dtype=torch.int32)
    logits = sharpness * torch.randn(rows, slots, columns)
    logits[..., support:] = float("-inf")
    probs = logits.softmax(-1)
    draws = draw(probs, min(width, columns))
    tokens, first, following = torch.zeros(3, rows, width, dtype=torch.int64).unbind()
    for row in range(rows):
        parents, depths = [-1], [0]
        while len(parents) < width:
            parent = random.choice([0, random.randrange(len(parents))])
            if depths[parent] < slots and parents.count(parent) < draws.shape[-1]:
                parents.append(parent)
                depths.append(depths[parent] + 1)
        first[row], following[row] = (torch.tensor(x) for x in links(tuple(parents)))
        for node, place in enumerate(places(tuple(parents)), 1):
            tokens[row, node] = draws[row][place]
    if ids is not None:
        tokens[:, 1:] = ids[tokens[:, 1:]]
    target = torch.randn(rows, width, vocab).mul(1.5).softmax(-1)
    coins = torch.rand(rows, width)
    return tokens, first, following, target, probs, ids, column_of, coins, slots + 1


def head(args: tuple, rows: int) -> tuple:
    """The first ``rows`` requests of ``args``."""
    *trees, ids, column_of, coins, depth = args
    return *(x[:rows] for x in trees), ids, column_of, coins[:rows], depth


def by_the_book(args: tuple, row: int) -> tuple[list[int], torch.Tensor]:
    """Path, and the distribution ``(V,)`` of the token after it; nothing is summed up over
    rejections."""
    tokens, first, following, target, probs, ids, _, coins, depth = args
    node, path = 0, [0]
    while True:
        r, s = target[row, node].double(), torch.zeros(target.shape[2], dtype=torch.float64)
        if len(path) == depth:
            return path, r
        s[slice(None) if ids is None else ids] = probs[row, len(path) - 1].double()
        s /= (mass := s.sum())
        node = int(first[row, node])
        while node >= 0 and s[tokens[row, node]] > 0:
            token = tokens[row, node]
            if coins[row, node] * s[token] < r[token]:
                path.append(node)
                break
            r = (r - s).clamp_min(0)
            r, s[token] = r / r.sum(), 0
            mass = mass * s.sum()
            if mass <= LEAST_MASS.value:
                return path, r
            s /= s.sum()
            node = int(following[row, node])
        else:
            return path, r


def next_token_weights(args: tuple, results: tuple) -> torch.Tensor:
    """``max(p - T q, 0) (B, V)`` as the documentation says."""
    target, probs, ids, slots = args[3], args[4], args[5], args[4].shape[1]
    path, num_correct, taken = results
    rows = torch.arange(len(path))
    p = target[rows, path[rows, num_correct].long()]
    q = probs[rows, num_correct.clamp_max(slots - 1)]
    if ids is not None:
        q = torch.zeros_like(p).index_copy_(1, ids, q)
    return (p - taken[:, None] * q).clamp_min(0)


def assert_same(actual: tuple, expected: tuple) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rejection_is_the_recursion_by_the_book(shape: tuple, launch: Callable) -> None:
    random.seed(0)
    args = make(shape)
    path, num_correct, taken = results = reject_tree(*args)
    assert path.dtype == torch.int32 and num_correct.dtype == torch.int64
    weights = next_token_weights(args, results).double()
    for row in range(shape[0]):
        expected, after = by_the_book(args, row)
        assert path[row].tolist() == expected + [-1] * (args[-1] - len(expected))
        assert num_correct[row] == len(expected) - 1
        torch.testing.assert_close(weights[row] / weights[row].sum(), after, rtol=1e-3, atol=1e-5)
    assert taken.dtype == torch.float32 and (taken > 0).any()
    assert shape[0] < 9 or {*num_correct.tolist()} >= {0, 1}
    for rows in (12, 1):
        again = launch("tree_rejection.reject_tree", *head(args, rows))
        assert_same(again, [x[:rows] for x in results])


def committed(
    variant: str, cut: str = "none"
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tokens ``(B, SLOTS + 1)`` and accepted drafts ``(B,)`` of many steps on the tree of
    ``PARENTS``, and the target's tables: of the first token ``(V,)``, the second given the first
    ``(V, V)``, …; with ``cut`` a mistake is planted in how draws are placed in the tree."""
    tables = [torch.randn(*[VOCAB] * n).mul(1.2).softmax(-1) for n in range(1, SLOTS + 2)]
    ids = torch.tensor([0, 1, 3, 4, 5]) if variant == "draft-vocabulary" else None
    column_of = None if ids is None else torch.tensor([0, 1, -1, 2, 3, 4])
    logits = 1.2 * torch.randn(SLOTS, VOCAB if ids is None else len(ids))
    if variant == "few-tokens":
        logits[:, 2:] = float("-inf")
    probs = logits.softmax(-1).expand(SAMPLES, -1, -1).contiguous()
    draws = draw(probs, 4)
    if cut != "none":
        scores = probs.gather(2, draws)
        order = scores.argsort(dim=-1, descending=True)
        # The three likeliest of four, in the order they were drawn or in that of their scores.
        order = order[..., :3] if cut == "likeliest" else order
        draws = draws.gather(2, order.sort(dim=-1).values if cut == "likeliest" else order)
    columns = torch.stack([draws[:, slot, rank] for slot, rank in places(PARENTS)], dim=1)
    tokens = torch.zeros(SAMPLES, len(PARENTS), dtype=torch.int64)
    tokens[:, 1:] = columns if ids is None else ids[columns]
    target = torch.empty(*tokens.shape, VOCAB)
    for node in range(len(PARENTS)):
        prefix, ancestor = (), node
        while ancestor > 0:
            prefix, ancestor = (tokens[:, ancestor], *prefix), PARENTS[ancestor]
        target[:, node] = tables[len(prefix)][prefix]
    first, following = (torch.tensor(x).expand(SAMPLES, -1).contiguous() for x in links(PARENTS))
    coins = torch.rand(SAMPLES, len(PARENTS))
    args = (tokens, first, following, target, probs, ids, column_of, coins, SLOTS + 1)
    path, num_correct, _ = results = reject_tree(*args)
    bonus = torch.multinomial(next_token_weights(args, results), 1)
    kept = tokens.gather(1, path[:, 1:].long().clamp_min(0))
    out = torch.cat([kept, bonus], dim=1).scatter_(1, num_correct[:, None], bonus)
    return out, num_correct, tables


def excess(out: torch.Tensor, num_correct: torch.Tensor, tables: list[torch.Tensor]) -> list[float]:
    """Of each token given those before it, total variation from the target's over its expectation
    for draws from that."""
    ratios = []
    for n, table in enumerate(tables):
        tokens = out[num_correct >= n, : n + 1]
        counts = torch.zeros(VOCAB ** (n + 1), dtype=torch.float64)
        cells = (tokens * VOCAB ** torch.arange(n, -1, -1)).sum(dim=1)
        counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))
        counts = counts.view(-1, VOCAB)
        prefixes = counts.sum(dim=1, keepdim=True)
        p = table.view(-1, VOCAB).double()
        noise = (2 / torch.pi * prefixes * p * (1 - p)).sqrt().sum()
        ratios.append(float((counts - prefixes * p).abs().sum() / noise))
    return ratios


@pytest.mark.parametrize("variant", ["whole-vocabulary", "draft-vocabulary", "few-tokens"])
def test_committed_tokens_have_the_targets_distribution(variant: str) -> None:
    out, num_correct, tables = committed(variant)
    assert num_correct.bincount(minlength=SLOTS + 1).min() > SAMPLES // 100
    assert max(excess(out, num_correct, tables)) < 2


@pytest.mark.parametrize("cut", ["sorted", "likeliest"])
def test_placing_draws_by_what_they_are_shows(cut: str) -> None:
    assert excess(*committed("whole-vocabulary", cut))[0] > 10


def both(launch: Callable, *args: object) -> list[tuple]:
    return [reject_tree(*args), launch("tree_rejection.reject_tree", *args)]


def test_a_draft_that_is_the_target_is_kept(launch: Callable) -> None:
    *args, coins, depth = make(SHAPES["usual"])
    tokens, first, following, target, probs, *_ = args
    for row in range(len(tokens)):  # all first children, down to a leaf
        node, slot = 0, 0
        while first[row, node] >= 0:
            target[row, node] = probs[row, slot]
            node, slot = int(first[row, node]), slot + 1
        assert slot
    expected = torch.zeros(len(tokens), depth, dtype=torch.int64)
    for n in range(1, depth):
        before = expected[:, n - 1 : n]
        expected[:, n] = torch.where(before >= 0, first.gather(1, before.clamp_min(0)), -1)[:, 0]
    for path, num_correct, taken in both(launch, *head((*args, coins, depth), 12)):
        assert torch.equal(path.long(), expected[:12]) and not taken.any()
        assert torch.equal(num_correct, (path > 0).sum(dim=1))


def test_a_target_without_the_drafts_keeps_none(launch: Callable) -> None:
    tokens, first, following, target, *rest = make(SHAPES["draft-vocabulary"])
    for row in range(12):
        target[row, 0, tokens[row, 1:]] = 0
    target[:, 0] /= target[:, 0].sum(dim=1, keepdim=True)
    args = head((tokens, first, following, target, *rest), 12)
    for path, num_correct, taken in (results := both(launch, *args)):
        assert path[:, 1:].eq(-1).all() and not num_correct.any() and taken.ge(1).all()
        weights = next_token_weights(args, (path, num_correct, taken))
        assert weights.gather(1, args[0][:, 1:]).eq(0).all() and weights.sum(dim=1).gt(0).all()
    assert_same(*results)


def test_a_root_without_children_takes_the_targets_token(launch: Callable) -> None:
    tokens, first, *rest = make(SHAPES["chain"])
    args = (tokens, torch.full_like(first, -1), *rest)
    for path, num_correct, taken in both(launch, *args):
        assert path.tolist() == [[0, -1]] * len(path) and not num_correct.any()
        assert not taken.any()


def test_a_path_ends_at_depth(launch: Callable) -> None:
    args = list(make((8, 2, 1, 9, 9, 9, 1)))
    # A chain of three drafts, all certain.
    args[0] = torch.tensor([[0, 3, 4, 5]]).repeat(8, 1)
    args[1], args[2] = torch.tensor([[1, 2, 3, -1]]).repeat(8, 1), torch.full((8, 4), -1)
    args[3] = torch.eye(9)[torch.tensor([3, 4, 5, 6])].repeat(8, 1, 1)
    args[4] = torch.eye(9)[torch.tensor([3, 4])].repeat(8, 1, 1)
    args[7] = torch.rand(8, 4)
    for path, num_correct, taken in both(launch, *args[:-1], 3):
        assert path.tolist() == [[0, 1, 2]] * 8 and num_correct.tolist() == [2] * 8
        assert not taken.any()


def test_empty_batch(launch: Callable) -> None:
    args = head(make(SHAPES["usual"]), 0)
    for path, num_correct, taken in both(launch, *args):
        assert path.shape == (0, args[-1]) and num_correct.shape == taken.shape == (0,)
