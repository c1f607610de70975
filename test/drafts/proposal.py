"""`ProposalDraftModel`: draws its drafts from given distributions, for tests of sampling."""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel
from sglang.srt.speculative.flashmap.side_stream import SideStream


class ProposalDraftModel(FlashMapDraftModel):
    """Drafts from tables: whatever the proposal, the answers must follow the target.

    `config.proposal` is the path of an array `(A, S, V, V)` of log-probabilities, indexed by the
    anchor's distance from position `config.proposal_start`, the slot, the anchor token and the
    drafted token. Distances and slots past the end of the array use its last entry.
    """

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self._table = torch.from_numpy(np.load(config.proposal))

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
        self._anchors, self._positions = anchors.cpu(), positions.cpu()
        return context

    def draft_logits(
        self,
        noise: torch.Tensor,
        positions: torch.Tensor,
        context: DraftContext,
        num_candidates: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        distances = self._positions - self.config.proposal_start
        rows = self._table[
            distances.clamp(0, self._table.shape[0] - 1)[:, None, None],
            torch.arange(self.config.block_size).clamp_max(self._table.shape[1] - 1),
            self._anchors[:, None, None],
        ]
        logits = rows.expand(-1, num_candidates, -1, -1).flatten(0, 2).to(noise.device, self.dtype)
        if self.draft_ids is not None:
            logits = logits[:, self.draft_ids]
        return logits if out is None else out.copy_(logits)


EntryClass = ProposalDraftModel
