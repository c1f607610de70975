"""grow_tree: all prefixes scored in plain Python, kernel against reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan, plan_tree
from sglang.kernels.ops.speculative.flashmap.tree_growth import grow_tree, grow_tree_torch

# (slots, choices, draws, width)
SHAPES = {
    "one-draw": (4, 3, 1, 9),
    "draws": (3, 4, 2, 9),
    "three-draws": (3, 5, 4, 6),
    "wider-than-all-prefixes": (2, 2, 1, 12),
    "one-slot": (1, 4, 2, 5),
    "one-of-each": (1, 1, 1, 2),
    "narrower-than-a-block": (6, 2, 1, 4),
}


def make(shape: tuple, rows: int) -> tuple:
    """Arguments of `grow_tree`: multiples of 1/8, so that products and sums are exact, some of them
    equal and some 0; every fourth row is a chain."""
    slots, choices, draws, width = shape
    tokens = torch.stack([torch.randperm(90)[:choices] + 1 for _ in range(rows * slots)])
    probs = torch.randint(9, (rows, slots, choices, draws)) / 8
    probs[:, :, -1] *= torch.randint(2, (rows, slots, 1))
    return (
        torch.randint(1000, (rows,)),
        tokens.view(rows, slots, choices),
        probs,
        torch.randint(1, 90, (rows, slots)),
        width,
        torch.arange(rows) % 4 == 3,
    )


def assert_equal(actual: TreePlan, expected: TreePlan) -> None:
    for field in fields(TreePlan):
        values, wanted = getattr(actual, field.name), getattr(expected, field.name)
        assert values.dtype == wanted.dtype and torch.equal(values, wanted), field.name


def grow_on_kernel(launch: Callable, anchors, tokens, probs, blocks, width, chain) -> TreePlan:
    """By the kernel, into buffers of other plans."""
    out = TreePlan.empty(len(probs), width, probs.device).tensors()
    for buffer in out:
        buffer.fill_(7)
    _, args = launch("tree_growth.grow_tree", anchors, tokens, probs, blocks, chain, out)
    return TreePlan(*args[5])


def likelihoods(tokens: torch.Tensor, probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Of every prefix of one request, by its definition."""
    slots, choices, draws = probs.shape
    names, given = tokens.tolist(), probs.tolist()
    every = {}
    for length in range(1, slots + 1):
        for path in itertools.product(range(choices), repeat=length):
            products = torch.ones(draws, dtype=torch.float64)
            for slot, choice in enumerate(path):
                products *= torch.tensor(given[slot][choice], dtype=torch.float64)
            every[tuple(names[slot][choice] for slot, choice in enumerate(path))] = float(
                products.mean()
            )
    return every


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_grows_the_likeliest_prefixes(shape: tuple) -> None:
    args = make(shape, rows=6)
    anchors, tokens, probs, blocks, width, chain = args
    plans = grow_tree(*args)
    for row in (~chain).nonzero().flatten().tolist():
        every = likelihoods(tokens[row], probs[row])
        possible = sorted((value for value in every.values() if value > 0), reverse=True)
        size = int(plans.num_nodes[row])
        assert size == 1 + min(width - 1, len(possible))
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, size):
            parent = int(plans.parents[row, node])
            assert parent < node
            paths.append((*paths[parent], int(plans.tokens[row, node])))
        assert len(set(paths)) == size
        assert [every[path] for path in paths[1:]] == possible[: size - 1]
        for node in range(width):
            attended = plans.mask[row, node].nonzero().flatten().tolist()
            if node >= size:
                assert attended == [node] and plans.parents[row, node] == -1
                assert plans.tokens[row, node] == 0 and plans.depths[row, node] == 0
                continue
            assert plans.depths[row, node] == len(paths[node])
            wanted = [i for i in range(size) if paths[node][: len(paths[i])] == paths[i]]
            assert attended == wanted
            children, child = [], int(plans.first_child[row, node])
            while child != -1:
                children.append(child)
                child = int(plans.next_sibling[row, child])
            assert children == [i for i in range(size) if plans.parents[row, i] == node]
        assert plans.tokens[row, 0] == anchors[row]
        assert plans.trie_nodes[row] == size - 1
        leaves = sum(all(path != other[:-1] for other in paths[1:]) for path in paths[1:])
        assert plans.distinct[row] == leaves


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_chain_rows_are_the_blocks(shape: tuple) -> None:
    anchors, tokens, probs, blocks, width, chain = make(shape, rows=5)
    grown = grow_tree(anchors, tokens, probs, blocks, width, torch.ones_like(chain))
    planned = plan_tree(anchors, blocks[:, None].contiguous(), width, torch.ones_like(chain))
    for name in ("tokens", "parents", "depths", "mask", "first_child", "next_sibling", "num_nodes"):
        assert torch.equal(getattr(grown, name), getattr(planned, name)), name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernel_grows_the_references_trees(shape: tuple, launch_and_args: Callable) -> None:
    args = make(shape, rows=4)
    assert_equal(grow_on_kernel(launch_and_args, *args), grow_tree_torch(*args))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_without_chains_every_row_grows(shape: tuple, launch_and_args: Callable) -> None:
    *grown, blocks, width, chain = make(shape, rows=4)
    expected = grow_tree_torch(*grown, blocks, width, torch.zeros_like(chain))
    assert_equal(grow_tree(*grown, None, width, None), expected)
    assert_equal(grow_on_kernel(launch_and_args, *grown, None, width, None), expected)


@pytest.mark.parametrize(
    "shape",
    [(2, 64, 1, 5), pytest.param((32, 64, 8, 129), marks=pytest.mark.cuda)],
    ids=["choices", "all"],
)
def test_kernel_at_the_limits(shape: tuple, launch_and_args: Callable) -> None:
    """Distinct powers of two decide the order whatever the order of sums."""
    slots, choices, draws, width = shape
    anchors, tokens, probs, blocks, _, chain = make(shape, rows=2)
    probs = 2.0 ** -torch.stack([torch.randperm(choices) for _ in range(2 * slots)]).float()
    probs = probs.view(2, slots, choices, 1).expand(-1, -1, -1, draws).contiguous()
    args = (anchors, tokens, probs, blocks, width, chain)
    assert_equal(grow_on_kernel(launch_and_args, *args), grow_tree_torch(*args))


def test_plans_into_given_buffers() -> None:
    args = make(SHAPES["draws"], rows=3)
    out = TreePlan.empty(3, args[4], args[2].device)
    addresses = [buffer.data_ptr() for buffer in out.tensors()]
    plans = grow_tree(*args, out=out)
    assert [buffer.data_ptr() for buffer in plans.tensors()] == addresses
    assert_equal(plans, grow_tree_torch(*args))


def test_empty_batch(launch_and_args: Callable) -> None:
    args = [x[:0] if isinstance(x, torch.Tensor) else x for x in make(SHAPES["draws"], rows=1)]
    assert grow_tree(*args).mask.shape == (0, 9, 9)
    assert grow_on_kernel(launch_and_args, *args).tokens.shape == (0, 9)


@pytest.mark.cuda
def test_a_captured_growth_follows_its_inputs() -> None:
    args = [x.cuda() if isinstance(x, torch.Tensor) else x for x in make(SHAPES["draws"], rows=5)]
    grow_tree(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plans = grow_tree(*args)
    for _ in range(3):
        args[2].copy_(make(SHAPES["draws"], rows=5)[2])
        graph.replay()
        assert_equal(plans, grow_tree_torch(*args))
