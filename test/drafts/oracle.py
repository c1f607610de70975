"""`OracleDraftModel`: replays references, so that a test decides how many drafts are accepted."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import torch
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel
from sglang.srt.speculative.flashmap.side_stream import SideStream

from drafts.replay import Corruption, Reference, Replay

# Softmax over a vocabulary of a million leaves less than 1e-15 to all other tokens together.
_PEAK = 50.0


class OracleDraftModel(FlashMapDraftModel):
    """Drafts the continuation of a known prompt, some slots corrupted.

    `config.oracle` holds `references` (path of a JSON list of `{"prompt": ids, "completion":
    ids}`), `probabilities` and `seed` (`drafts.replay.Corruption`). With `doubt`, each slot's
    second choice is that much below the first in its logits: the right token where that is wrong,
    so that trees grow branches to it. Weights are loaded and the context is written as ever, only
    the logits are not the network's. Requests without a reference get arbitrary drafts. A token
    outside a restricted draft vocabulary becomes its first token.
    """

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        oracle = config.oracle
        entries = json.loads(Path(oracle["references"]).read_text())
        references = [Reference(tuple(e["prompt"]), tuple(e["completion"])) for e in entries]
        self._corruption = Corruption(tuple(oracle["probabilities"]), oracle["seed"])
        self._doubt = oracle.get("doubt")
        self._replay = Replay(references, longest_step=config.block_size + 1)
        self._anchors: list[tuple[int, int, int]] = []

    def write_anchor(
        self,
        anchors: torch.Tensor,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        active: torch.Tensor,
        context: DraftContext,
        side: SideStream | None = None,
    ) -> DraftContext:
        context = super().write_anchor(
            anchors, positions=positions, slots=slots, active=active, context=context, side=side
        )
        rows = context.req_pool_indices.tolist()
        self._anchors = list(zip(rows, positions.tolist(), anchors.tolist()))
        self._references = [self._replay.match(*anchor) for anchor in self._anchors]
        return context

    def draft_logits(
        self,
        noise: torch.Tensor,
        positions: torch.Tensor,
        context: DraftContext,
        num_candidates: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        vocab_size, block_size = self.config.vocab_size, self.config.block_size
        wanted = []  # first and second choice of each row
        for (_, position, anchor), reference in zip(self._anchors, self._references):
            follows = self._replay.continuation(reference, position, anchor)
            for candidate, slot in product(range(num_candidates), range(block_size)):
                wrong = self._corruption.hits(position, slot, candidate)
                wanted.append(
                    [
                        follows.token(slot, vocab_size, corrupted=corrupted, candidate=candidate)
                        for corrupted in (wrong, not wrong)
                    ]
                )
        columns = torch.tensor(wanted, device=noise.device)
        if self.draft_columns is not None:
            columns = self.draft_columns[columns].to(torch.int64)
        if out is None:
            shape = len(wanted), self._folded_head.shape[0]
            out = torch.empty(shape, dtype=self.dtype, device=noise.device)
        out.zero_()
        if self._doubt is not None:
            out.scatter_(1, columns[:, 1:], _PEAK - self._doubt)
        return out.scatter_(1, columns[:, :1], _PEAK)


EntryClass = OracleDraftModel
