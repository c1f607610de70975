"""The drafts of a real server are those of the flashmap package, whatever path led to them.

A draft depends on every context entry, so a wrong position, a stale entry or another target layer
shows here, while greedy answers stay right whatever is drafted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from drafts.folders import write_oracle
from drafts.replay import Reference
from e2e_cases import CORRUPTION, Case, flashmap_server, flush_cache
from e2e_prompts import CHATS, CODE, LANGUAGES, LONG
from e2e_recorder import TOLERANCE, Package, Recorder, difference

CHUNK = 64
NUM_DRAFTS = 8  # of 16 slots
NUM_TOKENS = 32
PARAMS = dict(max_new_tokens=NUM_TOKENS, ignore_eos=True)


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


def check(drafts: list[dict[str, Any]], package: Package, asked: list[Case]) -> None:
    """Every draft is the package's, and every request of `asked` advanced by uneven steps."""
    for draft in drafts:
        assert draft["reference"] is not None, "drafted at a place that no request is at"
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
    _, drafts = recorder.ask(case.prompt, **PARAMS)
    check(drafts, package, [case])
    # What these comparisons are able to see.
    error = difference(package.logits(drafts[-1], stale=True), package.logits(drafts[-1]))
    assert error > 10 * TOLERANCE


def test_a_ragged_batch(recorder: Recorder, package: Package, cases: dict[str, Case]) -> None:
    chosen = [cases[text] for text in (CHATS[2], CODE[0], CODE[3], LANGUAGES[1], LANGUAGES[11])]
    _, drafts = recorder.ask([case.prompt for case in chosen], **PARAMS)
    check(drafts, package, chosen)


def test_a_prompt_prefilled_in_chunks_and_then_cached(
    recorder: Recorder, package: Package, cases: dict[str, Case]
) -> None:
    case = cases[LONG]
    assert len(case.prompt) > 4 * CHUNK
    flush_cache(recorder.server)
    for cached in (0, len(case.prompt) - 1):
        answer, drafts = recorder.ask(case.prompt, **PARAMS)
        assert answer["meta_info"]["cached_tokens"] == cached
        assert answer["output_ids"] == case.completion[:NUM_TOKENS]
        check(drafts, package, [case])
    assert recorder.server.log().count(f"#new-token: {CHUNK},") >= 4
