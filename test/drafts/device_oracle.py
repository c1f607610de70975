"""`DeviceOracleDraftModel`: replays references from tables on the device, in a CUDA graph too."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel
from sglang.srt.speculative.flashmap.side_stream import SideStream

from drafts.oracle import _PEAK


class DeviceOracleDraftModel(FlashMapDraftModel):
    """Drafts the continuation that has the anchor's token at the anchor's position.

    `config.oracle` as for `OracleDraftModel`; slot `i` of a candidate is wrong with the last of its
    probabilities, by an integer hash of position, slot and candidate. Where two references agree,
    one of them is drafted. The network runs too, and is overruled.
    """

    def attach_target(self, **arguments) -> None:
        super().attach_target(**arguments)
        device = self.embedding.device
        entries = json.loads(Path(self.config.oracle["references"]).read_text())
        texts = [entry["prompt"] + entry["completion"] for entry in entries]
        longest = max(map(len, texts)) + 1
        which = torch.full((longest, self.config.vocab_size), -1, dtype=torch.int64)
        tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
        for index, text in enumerate(texts):
            tokens[index, : len(text)] = torch.tensor(text)
            which[torch.arange(len(text)), torch.tensor(text)] = index
        self._which, self._tokens = which.to(device), tokens.to(device)
        self._wrong = int(self.config.oracle["probabilities"][-1] * 2**20)

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
        last = self._which.shape[0] - 1
        self._reference = self._which[positions.clamp_max(last), anchors]
        return context

    def draft_logits(
        self,
        noise: torch.Tensor,
        positions: torch.Tensor,
        context: DraftContext,
        num_candidates: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits = super().draft_logits(noise, positions, context, num_candidates, out)
        positions = positions.view(-1, num_candidates, self.config.block_size)
        candidate = torch.arange(num_candidates, device=positions.device)[:, None]
        slot = torch.arange(self.config.block_size, device=positions.device)
        reference = self._reference[:, None, None]
        right = self._tokens[reference.clamp_min(0), positions.clamp_max(self._tokens.shape[1] - 1)]
        mixed = (positions * 1000003 + slot * 7919 + candidate * 104729) * 2654435761
        wrong = ((mixed >> 12) % 2**20 < self._wrong) | (reference < 0)
        drafted = torch.where(wrong, right + 1 + candidate, right) % self.config.vocab_size
        return logits.zero_().scatter_(1, drafted.view(-1, 1), _PEAK)


EntryClass = DeviceOracleDraftModel
