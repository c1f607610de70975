"""Records what a server drafts and recomputes it with the flashmap package."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts.replay import Reference
from serving import Server

TOLERANCE = 1e-4


@dataclass
class Recorder:
    """A server that saves its drafts into `folder` while that exists."""

    server: Server
    folder: Path

    def ask(self, prompt: list[Any], **params: Any) -> tuple[Any, list[dict[str, Any]]]:
        """The greedy answers to one or several prompts, and what was drafted for them: one entry
        per request and step, oldest first (`drafts.recording`)."""
        self.folder.mkdir()
        try:
            answer = self.server.generate(prompt, **params)
            paths = sorted(self.folder.glob("*.pt"))
            return answer, [draft for path in paths for draft in torch.load(path)]
        finally:
            shutil.rmtree(self.folder)


@dataclass
class Package:
    """The flashmap package's drafter on transformers hidden states."""

    target: Any
    model: Any
    references: list[Reference]
    _features: dict[int, torch.Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def features(self, reference: int) -> torch.Tensor:
        if reference not in self._features:
            ids = torch.tensor([self.references[reference].tokens])
            states = self.target(ids, output_hidden_states=True).hidden_states
            self._features[reference] = self.model.select_target_hidden(states)
        return self._features[reference]

    @torch.inference_mode()
    def logits(
        self, draft: dict[str, Any], reference: int | None = None, *, stale: bool = False
    ) -> torch.Tensor:
        """`(K, V)` logits for a recorded draft's request, position, anchor and noise.

        `reference`: of the request; by default the recorded one. `stale`: as if the last context
        entry were that of the position before it.
        """
        from flashmap.modeling_flashmap import FlashMapCache

        reference = draft["reference"] if reference is None else reference
        context = self.features(reference)[:, : draft["position"]]
        if stale:
            context = torch.cat([context[:, :-1], context[:, -2:-1]], dim=1)
        cache = FlashMapCache(self.model.config, 1, context.shape[1] + 1)
        self.model.extend_context(cache, context)
        embedding = self.target.get_input_embeddings()
        head = self.target.get_output_embeddings()
        with pytest.MonkeyPatch.context() as patch:
            # The only numbers that a draft of one jump draws.
            patch.setattr(torch, "randn", lambda *_, **__: draft["noise"][None])
            return self.model.draft(torch.tensor([draft["anchor"]]), cache, embedding, head, 1)[0]


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())
