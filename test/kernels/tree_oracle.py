"""A verify tree as a dictionary of prefixes, and a walk by looking prefixes up: plain Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Trie:
    """Votes of every prefix of the candidates that are planned, its first candidate, and the least
    score of that candidate up to there."""

    votes: Counter[Prefix]
    first: dict[Prefix, int]
    scores: dict[Prefix, float]

    @classmethod
    def of(
        cls,
        candidates: list[list[int]],
        chain: bool = False,
        scores: list[list[float]] | None = None,
    ) -> Trie:
        trie = cls(Counter(), {}, {})
        for index, block in enumerate(candidates[:1] if chain else candidates):
            for length in range(1, len(block) + 1):
                prefix = tuple(block[:length])
                trie.votes[prefix] += 1
                trie.first.setdefault(prefix, index)
                score = 0.0 if scores is None else max(min(scores[index][:length]), 0.0)
                trie.scores.setdefault(prefix, score)
        return trie

    def kept(self, width: int) -> list[Prefix]:
        """The nodes in order, the root first."""
        order = sorted(
            self.votes, key=lambda p: (-self.votes[p], -self.scores[p], len(p), self.first[p])
        )
        return [(), *order[: width - 1]]


def plan(
    anchor: int,
    candidates: list[list[int]],
    width: int,
    chain: bool,
    scores: list[list[float]] | None = None,
) -> dict[str, object]:
    """What a row of a `TreePlan` has to be, by field."""
    trie = Trie.of(candidates, chain, scores)
    nodes = trie.kept(width)
    index = {prefix: i for i, prefix in enumerate(nodes)}
    padding = width - len(nodes)
    parents = [-1] + [index[prefix[:-1]] for prefix in nodes[1:]] + [-1] * padding
    later = [
        [j for j in range(i + 1, len(nodes)) if parents[j] == parents[i]] for i in range(width)
    ]
    distinct = sum(len(prefix) == len(candidates[0]) for prefix in trie.votes)
    return {
        "tokens": [anchor, *(prefix[-1] for prefix in nodes[1:])] + [0] * padding,
        "parents": parents,
        "depths": [len(prefix) for prefix in nodes] + [0] * padding,
        "mask": [
            [
                i == j
                or (j < len(nodes) and i < len(nodes) and nodes[i][: len(nodes[j])] == nodes[j])
                for j in range(width)
            ]
            for i in range(width)
        ],
        "first_child": [parents.index(i) if i in parents else -1 for i in range(width)],
        "next_sibling": [
            siblings[0] if siblings and parents[i] >= 0 else -1 for i, siblings in enumerate(later)
        ],
        "counts": [len(nodes), len(trie.votes), distinct],
    }


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> list[int]:
    """Node indices from the root on."""
    path = [0]
    while True:
        node = path[-1]
        next_nodes = [
            child
            for child, parent in enumerate(parents)
            if parent == node and tokens[child] == chosen[node]
        ]
        if not next_nodes:
            return path
        (following,) = next_nodes
        path.append(following)


def random_candidates(rows: int, candidates: int, slots: int, alphabet: int) -> torch.Tensor:
    """Tokens 1 ... alphabet; every other row has some candidates that copy a part of another."""
    blocks = torch.randint(1, alphabet + 1, (rows, candidates, slots))
    for row in range(0, rows, 2):
        source, target = torch.randint(candidates, (2,)).tolist()
        length = int(torch.randint(slots + 1, ()))
        blocks[row, target, :length] = blocks[row, source, :length]
    return blocks


def random_choices(plans: TreePlan, alphabet: int) -> torch.Tensor:
    """`chosen (B, W)`: three times in four the token of a random child, where there is one."""
    batch, width = plans.tokens.shape
    chosen = torch.randint(1, alphabet + 1, (batch, width))
    is_child = plans.parents[:, None, :] == torch.arange(width)[:, None]
    weights = is_child.float() + 1e-9
    child = torch.multinomial(weights.flatten(0, 1), 1).view(batch, width)
    follows = is_child.any(dim=-1) & (torch.rand(batch, width) < 0.75)
    return torch.where(follows, plans.tokens.gather(1, child), chosen)
