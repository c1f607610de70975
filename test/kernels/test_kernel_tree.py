"""plan_tree: a trie in a dictionary, invariants, the flashmap package, kernel against reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
import tree_oracle
from flashmap.sglang.tree import build_tree_abi
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan, plan_tree, plan_tree_torch

# (candidates, slots, width, alphabet)
SHAPES = {
    "usual": (8, 16, 17, 3),
    "one-candidate": (1, 16, 17, 3),
    "one-candidate-cut": (1, 16, 5, 3),
    "one-slot": (6, 1, 5, 3),
    "one-of-each": (1, 1, 2, 2),
    "all-equal": (5, 4, 9, 1),
    "all-different": (4, 3, 13, 1000),
    "wider-than-the-trie": (3, 5, 40, 2),
    "narrower-than-a-block": (7, 6, 4, 2),
    "width-2": (5, 4, 2, 2),
    "odd-sizes": (5, 7, 11, 2),
    "wide": (16, 8, 65, 2),
}
# The limits; the interpreter takes seconds for wide trees of many slots, a GPU takes them together.
LIMITS = {
    "candidates-and-slots": (64, 32, 3, 2),
    "width": (2, 3, 129, 2),
    "all": pytest.param((64, 32, 129, 2), marks=pytest.mark.cuda),
}


def make(shape: tuple, rows: int) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Arguments of `plan_tree`; every fourth row is a chain."""
    candidates, slots, width, alphabet = shape
    blocks = tree_oracle.random_candidates(rows, candidates, slots, alphabet)
    return torch.randint(1000, (rows,)), blocks, width, torch.arange(rows) % 4 == 3


def assert_equal(actual: TreePlan, expected: TreePlan) -> None:
    for field in fields(TreePlan):
        values, wanted = getattr(actual, field.name), getattr(expected, field.name)
        assert values.dtype == wanted.dtype and torch.equal(values, wanted), field.name


def some_scores(candidates: torch.Tensor) -> torch.Tensor:
    """Few values, so that some are equal; some grow along a candidate, some are negative."""
    return torch.randint(-1, 6, candidates.shape) / 5


def plan_on_kernel(launch: Callable, anchors, candidates, width, chain, scores=None) -> TreePlan:
    """By the kernel, into buffers of other plans."""
    out = TreePlan.empty(len(candidates), width, candidates.device).tensors()
    for buffer in out:
        buffer.fill_(7)
    _, args = launch("tree.plan_tree", anchors, candidates, chain, out, scores)
    return TreePlan(*args[3])


@pytest.mark.parametrize("scored", [False, True], ids=["votes", "scores"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plan_is_the_dictionary_tries(shape: tuple, scored: bool) -> None:
    anchors, candidates, width, chain = make(shape, rows=250)
    scores = some_scores(candidates) if scored else None
    plans = plan_tree(anchors, candidates, width, chain, scores=scores)
    columns = {field.name: getattr(plans, field.name).tolist() for field in fields(TreePlan)}
    for row, (anchor, blocks, is_chain) in enumerate(
        zip(anchors.tolist(), candidates.tolist(), chain.tolist())
    ):
        actual = {name: values[row] for name, values in columns.items()}
        row_scores = scores[row].tolist() if scored else None
        expected = tree_oracle.plan(anchor, blocks, width, is_chain, row_scores)
        assert actual == expected, (blocks, is_chain, row_scores)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernel_plans_the_references_trees(shape: tuple, launch_and_args: Callable) -> None:
    args = make(shape, rows=4 if max(shape[:3]) < 16 else 1)
    assert_equal(plan_on_kernel(launch_and_args, *args), plan_tree_torch(*args))


@pytest.mark.parametrize("shape", [(4, 4, 9, 2), (3, 5, 5, 2)], ids=["4x4", "3x5"])
def test_kernel_ranks_equal_votes_by_score(shape: tuple, launch_and_args: Callable) -> None:
    args = make(shape, rows=4)
    scores = some_scores(args[1])
    expected = plan_tree_torch(*args, scores)
    assert not torch.equal(expected.tokens, plan_tree_torch(*args).tokens)
    assert_equal(plan_on_kernel(launch_and_args, *args, scores), expected)


def test_scores_keep_close_values_apart(launch_and_args: Callable) -> None:
    """Neighbouring float32 values, and zero beside the smallest normal one."""
    score = torch.tensor([0.0, 2.0**-126, 0.5, 0.5 + 2.0**-24, 1.0])
    candidates = torch.arange(1, 6).view(1, 5, 1)
    args = (torch.tensor([9]), candidates, 6, torch.tensor([False]))
    for plans in (
        plan_tree(*args, scores=score.view(1, 5, 1)),
        plan_on_kernel(launch_and_args, *args, score.view(1, 5, 1)),
    ):
        assert plans.tokens.tolist() == [[9, 5, 4, 3, 2, 1]]


@pytest.mark.parametrize("shape", LIMITS.values(), ids=LIMITS)
def test_kernel_plans_trees_at_the_limits(shape: tuple, launch_and_args: Callable) -> None:
    anchors, candidates, width, chain = make(shape, rows=1)
    candidates[0, 1::2, :20] = candidates[0, :1, :20]  # deep common prefixes
    args = (anchors, candidates, width, chain)
    assert_equal(plan_on_kernel(launch_and_args, *args), plan_tree_torch(*args))


def test_kernel_tells_tokens_apart_by_all_their_bits(launch_and_args: Callable) -> None:
    candidates = torch.tensor([[[5, 1], [5 + 2**16, 1], [5 + 2**31, 1]]])
    args = (torch.tensor([2**40]), candidates, 7, torch.tensor([False]))
    plans = plan_on_kernel(launch_and_args, *args)
    assert plans.trie_nodes.item() == 6
    assert_equal(plans, plan_tree_torch(*args))


@st.composite
def candidate_sets(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    slots = draw(st.integers(1, 6))
    block = st.lists(st.integers(1, 3), min_size=slots, max_size=slots)
    return draw(st.lists(block, min_size=1, max_size=8)), draw(st.integers(2, 20))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(candidate_sets())
def test_every_plan_is_a_tree_of_top_prefixes(case: tuple[list[list[int]], int]) -> None:
    blocks, width = case
    plans = plan_tree(torch.tensor([9]), torch.tensor([blocks]), width, torch.tensor([False]))
    row = {field.name: getattr(plans, field.name)[0].tolist() for field in fields(TreePlan)}
    parents, tokens, size = row["parents"], row["tokens"], row["counts"][0]
    trie = tree_oracle.Trie.of(blocks)

    assert all(0 <= parent < i for i, parent in enumerate(parents[1:size], start=1))
    assert parents[size:] == [-1] * (width - size)
    ancestors: list[list[int]] = [[0]]
    for i in range(1, size):
        ancestors.append([*ancestors[parents[i]], i])
        assert row["depths"][i] == len(ancestors[i]) - 1
    for i in range(width):
        attended = [j for j in range(width) if row["mask"][i][j]]
        assert attended == (ancestors[i] if i < size else [i])

    prefixes = [tuple(tokens[j] for j in path[1:]) for path in ancestors]
    assert len(set(prefixes)) == size, "siblings share a token"
    votes = [trie.votes[prefix] for prefix in prefixes[1:]]
    assert votes == sorted(votes, reverse=True)
    assert votes == sorted(trie.votes.values(), reverse=True)[: width - 1]

    for i in range(width):
        children, child = [], row["first_child"][i]
        while child != -1:
            children.append(child)
            child = row["next_sibling"][child]
        assert children == [j for j, parent in enumerate(parents) if parent == i]


def test_chain_rows_are_candidate_0_in_order() -> None:
    blocks = torch.tensor([[[4, 4, 6], [4, 5, 7]]]).expand(2, -1, -1).contiguous()
    plans = plan_tree(torch.tensor([1, 2]), blocks, 6, torch.tensor([True, False]))
    assert plans.tokens.tolist() == [[1, 4, 4, 6, 0, 0], [2, 4, 4, 5, 6, 7]]
    assert plans.parents.tolist() == [[-1, 0, 1, 2, -1, -1], [-1, 0, 1, 1, 2, 3]]
    assert plans.first_child.tolist() == [[1, 2, 3, -1, -1, -1], [1, 2, 4, 5, -1, -1]]
    assert plans.next_sibling.tolist() == [[-1] * 6, [-1, -1, 3, -1, -1, -1]]
    assert torch.equal(plans.mask[0, :4, :4], torch.ones(4, 4, dtype=torch.bool).tril())
    assert plans.num_nodes.tolist() == [4, 6]


def test_keeps_the_nodes_that_the_package_keeps() -> None:
    """It lists them by depth and pads with copies: full trees are compared, as sets of prefixes."""
    width = 9
    candidates = tree_oracle.random_candidates(200, 6, 5, 3)
    plans = plan_tree(torch.zeros(200, dtype=torch.int64), candidates, width, torch.zeros(200) > 0)
    tokens, ids, stats = build_tree_abi(candidates, width)
    assert torch.equal(stats, torch.stack((plans.trie_nodes, plans.distinct), dim=1))

    def prefixes(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
        known: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents):
            known.append((*known[parent], token))
        return set(known)

    full = (plans.trie_nodes >= width - 1).nonzero().flatten().tolist()
    assert len(full) > 100
    for row in full:
        ours = prefixes(plans.tokens[row, 1:].tolist(), plans.parents[row, 1:].tolist())
        assert ours == prefixes(tokens[row].tolist(), (ids[row] // width).tolist())


def test_plans_into_given_buffers() -> None:
    anchors, candidates, width, chain = make(SHAPES["usual"], rows=3)
    out = TreePlan.empty(3, width, candidates.device)
    addresses = [buffer.data_ptr() for buffer in out.tensors()]
    for _ in range(2):
        plans = plan_tree(anchors, candidates, width, chain, out=out)
        assert [buffer.data_ptr() for buffer in plans.tensors()] == addresses
        assert_equal(plans, plan_tree_torch(anchors, candidates, width, chain))
        candidates = candidates.flip(0)


def test_empty_batch(launch_and_args: Callable) -> None:
    args = (torch.zeros(0).long(), torch.zeros(0, 2, 3).long(), 5, torch.zeros(0) > 0)
    assert plan_tree(*args).mask.shape == (0, 5, 5)
    assert plan_on_kernel(launch_and_args, *args).tokens.shape == (0, 5)


@pytest.mark.cuda
def test_a_captured_plan_follows_its_inputs() -> None:
    anchors, candidates, width, chain = (
        x.cuda() if isinstance(x, torch.Tensor) else x for x in make(SHAPES["usual"], rows=5)
    )
    plan_tree(anchors, candidates, width, chain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plans = plan_tree(anchors, candidates, width, chain)
    for _ in range(3):
        candidates.copy_(make(SHAPES["usual"], rows=5)[1])
        graph.replay()
        assert_equal(plans, plan_tree_torch(anchors, candidates, width, chain))
