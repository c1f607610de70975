"""`RecordingDraftModel`: the real network's drafts, kept for a comparison with the reference model."""

from __future__ import annotations

from pathlib import Path

import torch

from drafts.oracle import OracleDraftModel
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel


class RecordingDraftModel(OracleDraftModel):
    """Runs the network, records its drafts, and drafts what the oracle says.

    An untrained network is never right; with the oracle's tokens a request still advances by
    several tokens a step, so the recorded drafts see context entries of partial commits.

    While the folder `config.recordings` exists, each draft is saved there as `NNNN.pt`: a list with
    one dict per request: `reference` (index or None), `position`, `anchor`, `context_len`, `noise`
    `(K, H)`, `positions` `(K,)` and `logits` `(K, Vd)`.
    """

    def draft_logits(
        self,
        noise: torch.Tensor,
        positions: torch.Tensor,
        context: DraftContext,
        num_candidates: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        folder = Path(self.config.recordings)
        if folder.is_dir():
            logits = FlashMapDraftModel.draft_logits(self, noise, positions, context)
            self._save(folder, noise, positions, context, logits)
        return super().draft_logits(noise, positions, context, num_candidates, out)

    def _save(self, folder: Path, noise, positions, context, logits) -> None:
        requests = len(self._anchors)
        rows = zip(
            self._references,
            self._anchors,
            context.lens.tolist(),
            noise.view(requests, self.config.block_size, -1),
            positions.view(requests, -1),
            logits.view(requests, self.config.block_size, -1),
        )
        record = [
            dict(
                reference=reference,
                position=position,
                anchor=anchor,
                context_len=length,
                noise=request_noise.clone(),
                positions=slots.clone(),
                logits=request_logits.clone(),
            )
            for reference, (_, position, anchor), length, request_noise, slots, request_logits in rows
        ]
        # Renamed when complete: the test may look while the server writes.
        partial = folder / f"{len(list(folder.glob('*.pt'))):04d}.partial"
        torch.save(record, partial)
        partial.rename(partial.with_suffix(".pt"))


EntryClass = RecordingDraftModel
