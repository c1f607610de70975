"""How many tokens a draft would have accepted, measured without a server.

On text that the target wrote greedily, a drafted token is accepted exactly when it is the text's
next token and all before it in the block were. So one jump from fresh noise at random anchors, read
off greedily, gives a server's greedy accept length without decoding: 1 (the target's own token)
plus the leading matches. Text sampled at a temperature gives a lower bound.

At T = 1, on text that the target sampled at T = 1, token-wise rejection keeps `E` drafts of a block
(`acceptance_loss.py`) in expectation: no draft is drawn, and the mean over anchors is unbiased.

Anchors of a server follow its accepts and are not uniform, so a run of the real server differs a
little (`eval_draft.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from train.acceptance_loss import kept, statistics
from train.draws import Draws
from train.objectives import Example, OneJump, known_states
from train.vocabulary_loss import chunk_rows, head_logits, logits_of


@dataclass(frozen=True)
class Acceptance:
    """`slots[k]`: share of blocks whose first k + 1 tokens are accepted, or its expectation;
    `blocks` measured."""

    slots: tuple[float, ...]
    blocks: int

    @property
    def length(self) -> float:
        """Mean tokens a target pass."""
        return 1.0 + sum(self.slots)


@torch.no_grad()
def measure(network: nn.Module, one_jump: OneJump, examples: Iterable[Example]) -> Acceptance:
    """Over the blocks of `examples` that their text fills."""
    head = one_jump.reader.lm_head
    total, hits = 0, None
    for index, example in enumerate(examples):
        shape = tuple(example.labels.shape)
        hidden = one_jump.hidden(network, example.blocks, shape, Draws(0, index)).flatten(0, 2)
        rows = chunk_rows(head.weight.shape[0])
        drafted = torch.cat([logits_of(part, head).argmax(-1) for part in hidden.split(rows)])
        whole = (example.labels >= 0).all(-1)
        leading = (drafted.view(shape) == example.labels).long().cumprod(-1)[whole].sum(0)
        hits = leading if hits is None else hits + leading
        total += int(whole.sum())
    slots = (hits.double() / max(1, total)).tolist() if hits is not None else []
    return Acceptance(tuple(slots), total)


@torch.no_grad()
def measure_sampled(
    network: nn.Module, one_jump: OneJump, examples: Iterable[Example]
) -> Acceptance:
    """By rejection at T = 1, over the blocks of `examples` that their text fills."""
    head = one_jump.reader.lm_head
    total, sums = 0, None
    for index, example in enumerate(examples):
        labels = example.labels.flatten(0, 1)
        shape = tuple(example.labels.shape)
        hidden = one_jump.hidden(network, example.blocks, shape, Draws(0, index))
        hidden = hidden.view(*labels.shape, -1)
        known = known_states(example).view(*labels.shape, -1)
        whole = (labels >= 0).all(-1)
        blocks = max(1, chunk_rows(head.weight.shape[0]) // shape[-1])
        for some, others, ids in zip(
            *(rows[whole].split(blocks) for rows in (hidden, known, labels))
        ):
            found = statistics(
                head_logits(some.flatten(0, 1), head),
                head_logits(others.flatten(0, 1), head),
                ids.flatten(),
            )
            part = kept(found.terms, torch.ones_like(ids, dtype=torch.bool)).sum(0)
            sums = part if sums is None else sums + part
        total += int(whole.sum())
    slots = (sums.double() / max(1, total)).tolist() if sums is not None else []
    return Acceptance(tuple(slots), total)
