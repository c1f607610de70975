"""``Acceptor``: applies to each request of a batch the accept rule that ``plan.py`` gives it.

A rule is computed for the whole batch if one of its requests has it, and each request takes the
outcome of its own; a batch of one rule computes no other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.speculative.flashmap.greedy import argmax_keys, key_tokens
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.drafter import DraftBlock
from sglang.srt.speculative.flashmap.noise import SeedTable
from sglang.srt.speculative.flashmap.plan import StepRules, VerifyBlock
from sglang.srt.speculative.flashmap.target_probs import greedy_rows, target_probs
from sglang.srt.speculative.flashmap.verify import (
    Accepted,
    accept_drawn_tree,
    accept_greedy,
    accept_rejection,
    accept_walk,
    draw_nodes,
    merge_accepted,
    propose,
)
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_METHOD, sample_simulated_acc_len

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.models.flashmap import FlashMapDraftModel


class Acceptor:
    """Accept rules of a serving process.

    ``simulated_length``: upstream's SGLANG_SIMULATE_ACC_LEN for benchmarks, an accept length that
    replaces every rule; 0: none.
    """

    def __init__(
        self,
        serve: FlashMapServeConfig,
        model: "FlashMapDraftModel",
        seed_table: SeedTable,
        simulated_length: float = 0.0,
    ) -> None:
        self._serve = serve
        self._model = model
        self._seed_table = seed_table
        self._simulated_length = simulated_length

    def accept(
        self,
        batch: "ScheduleBatch",
        rules: StepRules,
        draft: DraftBlock,
        block: VerifyBlock,
        logits: torch.Tensor,
        relay: list[torch.Tensor] | None = None,
    ) -> Accepted:
        """The outcome for ``logits (B · W, V)``, adjusted, of the rows of ``block``.

        It is written to ``relay``, as of ``accept_chain``, too where that takes no launch.
        """
        lens = batch.seq_lens.to(torch.int64)
        if self._simulated_length > 0:
            return self._simulate(block, logits, lens, relay)
        rejected = self._reject(batch, draft, block, logits) if rules.rejection else None
        if rejected is not None and not (rules.greedy or rules.match):
            return rejected
        relay = relay if rejected is None else None
        if block.tree is None:
            walked = accept_greedy(block.tokens, self._argmax(logits), lens, relay)
        else:
            chosen = self._choose(batch, rules, block, logits)
            walked = accept_walk(block.tree, chosen, lens, self._serve.num_drafts, relay)
        if rejected is None:
            return walked
        return merge_accepted(walked, rejected, rules.rejected)

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Keys ``(B, W, S)`` of the first maxima."""
        keys = argmax_keys(logits)
        return keys.view(-1, self._serve.verify_width, keys.shape[1])

    def _choose(
        self,
        batch: "ScheduleBatch",
        rules: StepRules,
        block: VerifyBlock,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """The target's token after each node, or its key, as ``accept_walk`` takes them."""
        if not rules.match:
            return self._argmax(logits)
        info = batch.sampling_info
        drawn = draw_nodes(
            logits, info, depths=block.tree.depths, seeds=self._seeds(batch), anchors=batch.seq_lens
        )
        if not rules.greedy:
            return drawn
        return torch.where(greedy_rows(info)[:, None], key_tokens(self._argmax(logits)), drawn)

    def _reject(
        self,
        batch: "ScheduleBatch",
        draft: DraftBlock,
        block: VerifyBlock,
        logits: torch.Tensor,
    ) -> Accepted:
        """Rejection on a tree of draws, or on the chain of candidate 0, whose slot ``i`` is row
        ``i`` of its window."""
        info, length = batch.sampling_info, self._serve.num_drafts
        width = self._serve.verify_width
        proposal = propose(
            draft.logits[:, :length],
            temperatures=draft.temperatures,
            ids=self._model.draft_ids,
            column_of=self._model.draft_columns,
        )
        draws = dict(seeds=self._seeds(batch), anchors=batch.seq_lens.to(torch.int64))
        if self._serve.draws_trees:
            target = target_probs(logits, info, width)
            return accept_drawn_tree(block.tree, target, proposal, **draws)
        if width > length + 1:  # a window of trees has more rows than a block has slots
            logits = logits.view(-1, width, logits.shape[-1])[:, : length + 1].flatten(0, 1)
        target = target_probs(logits, info, length + 1)
        drafts, block_wise = draft.tokens[:, :length], self._serve.block_verification
        return accept_rejection(drafts, target, proposal, **draws, block_verification=block_wise)

    def _seeds(self, batch: "ScheduleBatch") -> torch.Tensor:
        return self._seed_table.seeds[batch.req_pool_indices.to(torch.int64)]

    def _simulate(
        self,
        block: VerifyBlock,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        relay: list[torch.Tensor] | None,
    ) -> Accepted:
        """An accept length whatever was drafted, in the launches of the greedy rule; in trees, of
        the rows that are furthest from their places, so that all of them are moved."""
        depth = self._serve.num_drafts + 1
        length = sample_simulated_acc_len(self._simulated_length, SIMULATE_ACC_METHOD, depth)
        chosen = self._argmax(logits)
        accepted = accept_greedy(block.tokens, chosen, seq_lens, relay, simulated=length)
        if block.tree is None:
            return accepted
        path = _last_rows(*block.tokens.shape, length, depth, logits.device)
        return dataclasses.replace(accepted, tokens=accepted.tokens[:, :depth], path=path)


@functools.cache
def _last_rows(
    size: int, width: int, length: int, depth: int, device: torch.device
) -> torch.Tensor:
    """Paths ``(size, depth)`` int32 of ``length`` that end in the windows' last rows, kept for
    good."""
    path = torch.full((size, depth), -1, dtype=torch.int32, device=device)
    path[:, 0] = 0
    path[:, 1:length] = torch.arange(width - length + 1, width, device=device)
    return path
