"""Other settings than the defaults: pages of 16, a narrow verify, a restricted draft vocabulary,
block verification and a pool that is too small for the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import pytest
from drafts.folders import write_oracle
from drafts.replay import Reference
from e2e_cases import (
    CORRUPTION,
    END,
    GRAMMARS,
    Case,
    assert_pool_is_free,
    check_grammar,
    flashmap_server,
    flush_cache,
    prompt_ids,
)
from e2e_prompts import BOOK, CHATS, CODE, COPIES, LANGUAGES, LISTS, LONG
from e2e_recorder import TOLERANCE, Package, Recorder, difference
from safetensors.torch import load_file
from serving import Server

NUM_DRAFTS = 4
DRAFT_VOCABULARY = 16384
POOL = 768


@pytest.fixture(scope="module")
def narrow(
    smollm: Path,
    untrained: Path,
    references: list[Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Recorder]:
    folder = tmp_path_factory.mktemp("drafts") / "narrow"
    recordings = folder / "recordings"
    write_oracle(
        folder,
        untrained,
        references,
        CORRUPTION,
        architecture="RecordingDraftModel",
        recordings=str(recordings),
    )
    with flashmap_server(
        smollm, folder,
        "--page-size", 16,
        "--speculative-num-draft-tokens", NUM_DRAFTS + 1,
        "--speculative-flashmap-draft-vocab-size", DRAFT_VOCABULARY,
        "--speculative-use-block-verification",
        # Admits requests that the pool cannot hold to their ends.
        "--max-total-tokens", POOL,
        "--schedule-conservativeness", 0.1,
    ) as server:  # fmt: skip
        yield Recorder(server, recordings)


@pytest.fixture(scope="module")
def server(narrow: Recorder) -> Server:
    return narrow.server


def test_the_settings_are_on(server: Server) -> None:
    info = server.request("/server_info")
    assert info["page_size"] == 16
    assert info["speculative_num_draft_tokens"] == NUM_DRAFTS + 1
    assert info["speculative_use_block_verification"] is True
    draft = info["internal_states"][0]["memory_usage"]["draft"]
    assert min(draft["weight"], draft["precomputed"], draft["kvcache"]) > 0 == draft["graph"]
    assert f"memory of the draft: weight {draft['weight']:.3f} GB" in server.log()
    assert "4 verified" in server.log() and f"draft vocabulary {DRAFT_VOCABULARY}" in server.log()


def test_requests_that_the_pool_cannot_hold(
    narrow: Recorder,
    package: Package,
    untrained: Path,
    references: list[Reference],
    cases: dict[str, Case],
) -> None:
    texts = (*CHATS[1:4], LISTS[2], *CODE[:2], *COPIES[:2], *LANGUAGES[:2], LANGUAGES[10])
    chosen = [cases[text] for text in texts]
    # With ignore_eos the scheduler would reckon with the whole length.
    answers, drafts = narrow.ask([case.prompt for case in chosen], max_new_tokens=64)
    for case, answer in zip(chosen, answers):
        assert answer["output_ids"] == case.until(END)[:64], case.text
        assert 1 < answer["meta_info"]["spec_accept_length"] <= NUM_DRAFTS + 1
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert_pool_is_free(narrow.server)
    # The drafts saw the right context, also after a retracted request came back.
    ids = load_file(untrained / "draft_vocab.safetensors")["ids"][:DRAFT_VOCABULARY].sort().values
    asked = [references.index(case.reference) for case in chosen]
    for draft in drafts[::3]:
        # Which request came back is not always known at once.
        possible = [
            package.logits(draft, index)[:, ids]
            for index in asked
            if references[index].tokens[draft["position"] :][:1] == (draft["anchor"],)
        ]
        assert min(difference(draft["logits"], wanted) for wanted in possible) < TOLERANCE


def test_cached_prompt(server: Server, cases: dict[str, Case]) -> None:
    case = cases[LONG]
    flush_cache(server)
    for cached in (0, (len(case.prompt) - 1) // 16 * 16):
        answer = server.generate(case.prompt, max_new_tokens=24, ignore_eos=True)
        assert answer["meta_info"]["cached_tokens"] == cached
        assert answer["output_ids"] == case.completion[:24]


def test_sampled_grammars_mixed_with_free_text(server: Server, tokenizer: Any) -> None:
    names = [*GRAMMARS, "free"] * 2
    params = [
        dict(temperature=0.7, top_p=0.95, max_new_tokens=80, **GRAMMARS.get(name, {}))
        for name in names
    ]
    prompt = prompt_ids(tokenizer, BOOK)
    answers = server.request(
        "/generate", dict(input_ids=[prompt] * len(names), sampling_params=params)
    )
    for name, answer in zip(names, answers):
        if name != "free":
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            check_grammar(name, answer["text"])
