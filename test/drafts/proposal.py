"""`ProposalDraftModel`: draws its drafts from given distributions, for tests of sampling."""

from __future__ import annotations

import torch

from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel


class ProposalDraftModel(FlashMapDraftModel):
    """Slot `i` is drawn from softmax of row `i` of `config.proposal` (rows × vocabulary).

    Rows are given for the anchors at position `config.proposal_start`; an anchor `n` positions
    further on starts at row `n`. Slots past the last row take the last row.
    """

    def draft_logits(
        self,
        noise: torch.Tensor,
        positions: torch.Tensor,
        context: DraftContext,
        num_candidates: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        table = torch.tensor(self.config.proposal, dtype=self.dtype, device=noise.device)
        if self.draft_ids is not None:
            table = table[:, self.draft_ids]
        rows = positions - self.config.proposal_start - 1
        return torch.index_select(table, 0, rows.clamp(0, table.shape[0] - 1), out=out)


EntryClass = ProposalDraftModel
