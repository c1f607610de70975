"""Growing a tree, walking it and moving what it accepted add up for any draft, target and width."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.kernels.ops.speculative.flashmap.accepted_kv import move_accepted
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan, plan_tree
from sglang.kernels.ops.speculative.flashmap.tree_growth import grow_tree
from sglang.srt.speculative.flashmap.verify import accept_walk
from test_soak_arithmetic import quick

VOCAB = 3  # small, so that drafts are right by chance
Prefix = tuple[int, ...]


@st.composite
def grown(draw: Any) -> tuple[torch.Tensor, TreePlan]:
    """Probabilities `(B, K, U, N)` of each slot's choices, token `u` being `u + 1`, and trees."""
    size, slots, draws = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    width, chain = draw(st.integers(2, 20)), draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    probs = torch.rand(size, slots, VOCAB, draws, generator=generator).softmax(2)
    tokens = torch.arange(1, VOCAB + 1).expand(size, slots, VOCAB).contiguous()
    blocks = torch.randint(1, VOCAB + 1, (size, slots), generator=generator)
    chains = torch.zeros(size, dtype=torch.bool)
    chains[0] = chain
    return probs, grow_tree(torch.zeros(size).long(), tokens, probs, blocks, width, chains)


@st.composite
def voted(draw: Any) -> TreePlan:
    size, slots, width = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(2, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    blocks = torch.randint(
        1, VOCAB + 1, (size, draw(st.integers(1, 6)), slots), generator=generator
    )
    return plan_tree(torch.zeros(size).long(), blocks, width, torch.zeros(size, dtype=torch.bool))


def prefixes(tree: TreePlan, row: int) -> list[Prefix]:
    """The drafts on the way to each node, its own included; of the anchor none."""
    found: list[Prefix] = [()]
    for node in range(1, int(tree.num_nodes[row])):
        parent = int(tree.parents[row, node])
        assert 0 <= parent < node
        found.append((*found[parent], int(tree.tokens[row, node])))
    assert len(set(found)) == len(found), "siblings share a token"
    return found


@quick
@given(case=grown())
def test_a_grown_tree_holds_the_likeliest_prefixes(case: tuple[torch.Tensor, TreePlan]) -> None:
    probs, tree = case
    slots = probs.shape[1]

    def likelihood(row: int, prefix: Prefix) -> float:
        draws = [probs[row, slot, token - 1] for slot, token in enumerate(prefix)]
        return float(torch.stack(draws).double().prod(dim=0).mean())

    for row in range(1, len(probs)):  # the first may be a chain
        kept = [likelihood(row, prefix) for prefix in prefixes(tree, row)[1:]]
        every = [
            likelihood(row, prefix)
            for length in range(1, slots + 1)
            for prefix in itertools.product(range(1, VOCAB + 1), repeat=length)
        ]
        expected = torch.tensor(sorted(every, reverse=True)[: tree.tokens.shape[1] - 1])
        torch.testing.assert_close(torch.tensor(kept), expected, rtol=1e-5, atol=1e-7)


@quick
@given(tree=st.one_of(voted(), grown().map(lambda case: case[1])), data=st.data())
def test_a_tree_commits_what_one_token_at_a_time_would(tree: TreePlan, data: st.DataObject) -> None:
    """And its slots then hold the committed prefix in order, those of other requests their own."""
    size, width = tree.tokens.shape
    seed = data.draw(st.integers(0, 2**16))

    def says(row: int, prefix: Prefix) -> int:
        """The target, which knows the whole prefix."""
        return hash((seed, row, *prefix)) % VOCAB + 1

    nodes = [prefixes(tree, row) for row in range(size)]
    chosen = torch.zeros_like(tree.tokens)
    for row, found in enumerate(nodes):
        chosen[row, : len(found)] = torch.tensor([says(row, prefix) for prefix in found])
    depth = 1 + max(len(prefix) for found in nodes for prefix in found)
    accepted = accept_walk(tree, chosen, torch.zeros_like(chosen[:, 0]), depth - 1)

    # Windows of slots in any order; each node's KV is its request and its place among the nodes.
    slots = torch.tensor(data.draw(st.permutations(range(size * width)))).view(size, width)
    pool = torch.empty(size * width, 1, 2)
    pool[slots.view(-1), 0] = torch.cartesian_prod(torch.arange(size), torch.arange(width)).float()
    move_accepted([pool], slots, accepted.path)

    for row, found in enumerate(nodes):
        prefix: Prefix = ()
        committed = [()]
        while (prefix := (*prefix, says(row, prefix))) in found:
            committed.append(prefix)
        length = int(accepted.num_correct[row])
        assert tuple(accepted.tokens[row, : length + 1].tolist()) == prefix
        held = pool[slots[row, : length + 1], 0].long().tolist()
        assert held == [[row, found.index(prefix)] for prefix in committed]
