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
from serving import Server

NUM_DRAFTS = 4
POOL = 768


@pytest.fixture(scope="module")
def narrow(
    smollm: Path,
    untrained: Path,
    references: list[Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("drafts") / "narrow"
    write_oracle(folder, untrained, references, CORRUPTION)
    with flashmap_server(
        smollm, folder,
        "--page-size", 16,
        "--speculative-num-draft-tokens", NUM_DRAFTS + 1,
        "--speculative-flashmap-draft-vocab-size", 16384,
        "--speculative-use-block-verification",
        # Admits requests that the pool cannot hold to their ends.
        "--max-total-tokens", POOL,
        "--schedule-conservativeness", 0.1,
    ) as server:  # fmt: skip
        yield server


def test_the_settings_are_on(narrow: Server) -> None:
    info = narrow.request("/server_info")
    assert info["page_size"] == 16
    assert info["speculative_num_draft_tokens"] == NUM_DRAFTS + 1
    assert info["speculative_use_block_verification"] is True
    assert "4 verified" in narrow.log() and "draft vocabulary 16384" in narrow.log()


def test_greedy_answers_when_requests_are_retracted(narrow: Server, cases: dict[str, Case]) -> None:
    texts = (*CHATS[1:4], LISTS[2], *CODE[:2], *COPIES[:2], *LANGUAGES[:2], LANGUAGES[10])
    chosen = [cases[text] for text in texts]
    # With ignore_eos the scheduler would reckon with the whole length.
    answers = narrow.generate([case.prompt for case in chosen], max_new_tokens=64)
    for case, answer in zip(chosen, answers):
        assert answer["output_ids"] == case.until(END)[:64], case.text
        assert 1 < answer["meta_info"]["spec_accept_length"] <= NUM_DRAFTS + 1
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert_pool_is_free(narrow)


def test_cached_prompt(narrow: Server, cases: dict[str, Case]) -> None:
    case = cases[LONG]
    flush_cache(narrow)
    for cached in (0, (len(case.prompt) - 1) // 16 * 16):
        answer = narrow.generate(case.prompt, max_new_tokens=24, ignore_eos=True)
        assert answer["meta_info"]["cached_tokens"] == cached
        assert answer["output_ids"] == case.completion[:24]


def test_sampled_grammars_mixed_with_free_text(narrow: Server, tokenizer: Any) -> None:
    names = [*GRAMMARS, "free"] * 2
    params = [
        dict(temperature=0.7, top_p=0.95, max_new_tokens=80, **GRAMMARS.get(name, {}))
        for name in names
    ]
    prompt = prompt_ids(tokenizer, BOOK)
    answers = narrow.request(
        "/generate", dict(input_ids=[prompt] * len(names), sampling_params=params)
    )
    for name, answer in zip(names, answers):
        if name != "free":
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            check_grammar(name, answer["text"])
