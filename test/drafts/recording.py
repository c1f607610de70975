"""`RecordingDraftModel`: keeps the real network's drafts, to compare them with another's."""

from __future__ import annotations

from pathlib import Path

import torch
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel

from drafts.oracle import OracleDraftModel


class RecordingDraftModel(OracleDraftModel):
    """Runs the network, records its drafts, and drafts what the oracle says.

    An untrained network is never right; with the oracle's tokens a request still advances by
    several tokens a step, so the recorded drafts see context entries of partial commits.

    While the folder `config.recordings` exists, each draft is saved there as `NNNN.pt`: a list with
    one dict per request and candidate block, a request's candidates in order: `reference` (index or
    None), `position`, `anchor`, `context_len`, `noise` `(K, H)`, `positions` `(K,)` and `logits`
    `(K, Vd)`.
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
            logits = FlashMapDraftModel.draft_logits(
                self, noise, positions, context, num_candidates
            )
            self._save(folder, noise, positions, context, logits, num_candidates)
        return super().draft_logits(noise, positions, context, num_candidates, out)

    def _save(self, folder: Path, noise, positions, context, logits, num_candidates: int) -> None:
        shape = len(self._anchors), num_candidates, self.config.block_size, -1
        noise, positions, logits = (t.view(shape).clone() for t in (noise, positions, logits))
        record = [
            dict(
                reference=self._references[i],
                position=position,
                anchor=anchor,
                context_len=int(context.lens[i]),
                noise=noise[i, candidate],
                positions=positions[i, candidate, :, 0],
                logits=logits[i, candidate],
            )
            for i, (_, position, anchor) in enumerate(self._anchors)
            for candidate in range(num_candidates)
        ]
        # Renamed when complete: the test may look while the server writes.
        partial = folder / f"{len(list(folder.glob('*.pt'))):04d}.partial"
        torch.save(record, partial)
        partial.rename(partial.with_suffix(".pt"))


EntryClass = RecordingDraftModel
