"""The drafts of a real server are those of the flashmap package, whatever path led to them.

A draft depends on every context entry, so a wrong position, a stale entry or another target layer
shows here, while greedy answers stay right whatever is drafted.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from drafts.folders import write_oracle
from drafts.replay import Reference
from e2e_cases import CORRUPTION, Case, flashmap_server, flush_cache
from e2e_prompts import CHATS, CODE, LANGUAGES, LONG
from serving import Server

CHUNK = 64
NUM_DRAFTS = 8  # of 16 slots
NUM_TOKENS = 32
TOLERANCE = 1e-3


@dataclass
class Recorder:
    """A server that saves its drafts into `folder` while that exists."""

    server: Server
    folder: Path

    def ask(self, prompt: list[Any]) -> tuple[Any, list[dict[str, Any]]]:
        """The greedy answers to one or several prompts, and what was drafted for them: one entry
        per request and step, oldest first."""
        self.folder.mkdir()
        try:
            answer = self.server.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True)
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
            found = self.references[reference]
            ids = torch.tensor([found.tokens[: len(found.prompt) + NUM_TOKENS]])
            states = self.target(ids, output_hidden_states=True).hidden_states
            self._features[reference] = self.model.select_target_hidden(states)
        return self._features[reference]

    @torch.inference_mode()
    def logits(self, draft: dict[str, Any], *, stale: bool = False) -> torch.Tensor:
        """`(K, V)` logits for a recorded draft's request, position, anchor and noise.

        `stale`: as if the last context entry were that of the position before it.
        """
        from flashmap.modeling_flashmap import FlashMapCache

        context = self.features(draft["reference"])[:, : draft["position"]]
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


@pytest.fixture(scope="module")
def package(smollm: Path, untrained: Path, references: list[Reference]) -> Package:
    from flashmap import FlashMapDraftModel
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    model = FlashMapDraftModel.from_pretrained(untrained, dtype=torch.float32).eval()
    return Package(target, model, references)


@pytest.fixture(scope="module")
def recorder(
    smollm: Path,
    untrained: Path,
    references: list[Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Recorder]:
    folder = tmp_path_factory.mktemp("drafts") / "recorder"
    recordings = folder / "recordings"
    write_oracle(
        folder,
        untrained,
        references,
        CORRUPTION,
        architecture="RecordingDraftModel",
        recordings=str(recordings),
    )
    args = ("--chunked-prefill-size", CHUNK, "--speculative-num-draft-tokens", NUM_DRAFTS + 1)
    with flashmap_server(smollm, folder, *args, "--max-total-tokens", 8192) as server:
        yield Recorder(server, recordings)


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def check(drafts: list[dict[str, Any]], package: Package, asked: list[Case]) -> None:
    """Every draft is the package's, and every request of `asked` advanced by uneven steps."""
    for draft in drafts:
        wanted = package.logits(draft)
        place = f"position {draft['position']} of {draft['reference']}"
        assert draft["context_len"] == draft["position"] + 1
        slots = range(draft["position"] + 1, draft["position"] + 1 + len(wanted))
        assert draft["positions"].tolist() == list(slots)
        assert difference(draft["logits"], wanted) < TOLERANCE, place
        assert torch.equal(draft["logits"].argmax(-1), wanted.argmax(-1)), place
    for case in asked:
        steps = [
            draft["position"]
            for draft in drafts
            if package.references[draft["reference"]] == case.reference
        ]
        assert steps[0] == len(case.prompt)
        advances = {after - before for before, after in zip(steps, steps[1:])}
        assert len(advances) > 1 and max(advances) > 1, "steps are not of several lengths"


def test_a_prompt_alone(recorder: Recorder, package: Package, cases: dict[str, Case]) -> None:
    case = cases[CHATS[1]]
    _, drafts = recorder.ask(case.prompt)
    check(drafts, package, [case])
    # What these comparisons are able to see.
    error = difference(package.logits(drafts[-1], stale=True), package.logits(drafts[-1]))
    assert error > 10 * TOLERANCE


def test_a_ragged_batch(recorder: Recorder, package: Package, cases: dict[str, Case]) -> None:
    chosen = [cases[text] for text in (CHATS[2], CODE[0], CODE[3], LANGUAGES[1], LANGUAGES[11])]
    _, drafts = recorder.ask([case.prompt for case in chosen])
    check(drafts, package, chosen)


def test_a_prompt_prefilled_in_chunks_and_then_cached(
    recorder: Recorder, package: Package, cases: dict[str, Case]
) -> None:
    case = cases[LONG]
    assert len(case.prompt) > 4 * CHUNK
    flush_cache(recorder.server)
    for cached in (0, len(case.prompt) - 1):
        answer, drafts = recorder.ask(case.prompt)
        assert answer["meta_info"]["cached_tokens"] == cached
        assert answer["output_ids"] == case.completion[:NUM_TOKENS]
        check(drafts, package, [case])
    assert recorder.server.log().count(f"#new-token: {CHUNK},") >= 4
