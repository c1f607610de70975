"""walk_tree: a walk over parents in plain Python, edge cases, kernel against reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import tree_oracle
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan, plan_tree
from sglang.kernels.ops.speculative.flashmap.tree_walk import walk_tree

# (candidates, slots, width, alphabet)
SHAPES = {
    "usual": (8, 16, 17, 3),
    "many-siblings": (16, 2, 24, 9),
    "chain": (1, 5, 6, 2),
    "padded": (2, 3, 19, 2),
    "one-node": (3, 1, 2, 2),
    "wide": (32, 8, 129, 2),
}


def make(shape: tuple, rows: int) -> tuple[TreePlan, torch.Tensor]:
    candidates, slots, width, alphabet = shape
    blocks = tree_oracle.random_candidates(rows, candidates, slots, alphabet)
    plans = plan_tree(torch.randint(9, (rows,)), blocks, width, torch.arange(rows) % 4 == 3)
    return plans, tree_oracle.random_choices(plans, alphabet)


def walk_args(plans: TreePlan, chosen: torch.Tensor, depth: int) -> tuple:
    lens = torch.arange(len(chosen)) + 2**33
    return plans.tokens, plans.first_child, plans.next_sibling, chosen, lens, depth


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_walk_is_the_walk_over_parents(shape: tuple, launch: Callable) -> None:
    plans, chosen = make(shape, rows=300)
    depth = shape[1] + 1
    args = walk_args(plans, chosen, depth)
    path, num_correct, committed, bonus, commit_lens, new_lens = results = walk_tree(*args)
    assert path.dtype == torch.int32 and num_correct.dtype == torch.int64
    for row in range(300):
        tokens, parents, picks = (x[row].tolist() for x in (plans.tokens, plans.parents, chosen))
        expected = tree_oracle.walk(tokens, parents, picks)
        end = [-1] * (depth - len(expected))
        assert path[row].tolist() == expected + end
        assert num_correct[row] == len(expected) - 1
        drafts = [tokens[node] for node in expected[1:]]
        assert committed[row].tolist() == [*drafts, picks[expected[-1]], *(0 for _ in end)]
        assert bonus[row] == picks[expected[-1]] and commit_lens[row] == len(expected)
    assert torch.equal(new_lens, args[4] + commit_lens)
    assert num_correct.float().mean() > 0.5
    few = [x[:40] if isinstance(x, torch.Tensor) else x for x in args]
    for actual, reference in zip(launch("tree_walk.walk_tree", *few, []), results, strict=True):
        assert actual.dtype == reference.dtype and torch.equal(actual, reference[:40])
    # The same choices, as keys of three splits.
    keys = torch.full((40, shape[2], 3), -1)
    keys[..., 1] = 2**31 - 1 - chosen[:40]
    few[3] = keys
    for walk in (walk_tree(*few), launch("tree_walk.walk_tree", *few, [])):
        assert all(torch.equal(x, y[:40]) for x, y in zip(walk, results, strict=True))


def test_a_whole_block_is_accepted(launch: Callable) -> None:
    plans, _ = make(SHAPES["chain"], rows=1)
    chosen = plans.tokens.roll(-1, dims=1)
    args = walk_args(plans, chosen, 6)
    for path, num_correct, *_ in (walk_tree(*args), launch("tree_walk.walk_tree", *args, [])):
        assert path.tolist() == [[0, 1, 2, 3, 4, 5]] and num_correct.tolist() == [5]


def test_padding_is_not_reached(launch: Callable) -> None:
    """Padding holds token 0, and here the target chooses nothing else."""
    plans, chosen = make(SHAPES["padded"], rows=6)
    args = walk_args(plans, chosen * 0, 4)
    for path, num_correct, *_ in (walk_tree(*args), launch("tree_walk.walk_tree", *args, [])):
        assert path.tolist() == [[0, -1, -1, -1]] * 6 and not num_correct.any()


def test_a_path_ends_at_depth(launch: Callable) -> None:
    plans, _ = make(SHAPES["chain"], rows=2)
    chosen = plans.tokens.roll(-1, dims=1)
    args = walk_args(plans, chosen, 3)
    for path, num_correct, *_ in (walk_tree(*args), launch("tree_walk.walk_tree", *args, [])):
        assert path.tolist() == [[0, 1, 2]] * 2 and num_correct.tolist() == [2, 2]


def test_the_next_steps_tables_are_written(launch_and_args: Callable) -> None:
    plans, chosen = make(SHAPES["usual"], rows=3)
    rows, tables = torch.tensor([4, 0, 2]), torch.full((2, 6), -1)
    args = walk_args(plans, chosen, 17)
    *_, bonus, _, new_lens = walk_tree(*args, relay=[rows, *tables])
    expected = torch.full((2, 6), -1)
    expected[0, rows], expected[1, rows] = new_lens, bonus
    assert torch.equal(tables, expected)
    fresh = torch.full((2, 6), -1).unbind()
    _, after = launch_and_args("tree_walk.walk_tree", *args, [rows, *fresh])
    assert torch.equal(torch.stack(list(after[6][1:])), expected)


def test_empty_batch(launch: Callable) -> None:
    none = torch.zeros(0, 5, dtype=torch.int64)
    args = (none, none, none, none, none[:, 0], 4)
    for path, num_correct, committed, *_ in (
        walk_tree(*args),
        launch("tree_walk.walk_tree", *args, []),
    ):
        assert path.shape == committed.shape == (0, 4) and num_correct.shape == (0,)
