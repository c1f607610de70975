"""Greedy answers with FLASHMAP are the token ids that the server gives without it."""

from __future__ import annotations

import pytest
from e2e_cases import BLOCK_SIZE, END, NUM_TOKENS, Case, flush_cache, histogram
from e2e_prompts import CHATS, CODE, LANGUAGES, LISTS, LONG
from serving import Server


def test_one_batch_of_all_prompts(oracle: Server, cases: dict[str, Case]) -> None:
    prompts = [case.prompt for case in cases.values()]
    answers = oracle.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    lengths = set()
    for case, answer in zip(cases.values(), answers):
        assert answer["output_ids"] == case.completion[:NUM_TOKENS], case.text
        accepts = case.accepts(NUM_TOKENS)
        meta = answer["meta_info"]
        assert meta["spec_correct_drafts_histogram"] == histogram(accepts), case.text
        assert meta["spec_verify_ct"] == len(accepts)
        assert meta["spec_accept_length"] == pytest.approx(NUM_TOKENS / len(accepts))
        lengths.update(accepts)
    assert {0, BLOCK_SIZE} < lengths, "no full reject or no full accept was exercised"
    assert len(lengths) > BLOCK_SIZE // 2


@pytest.mark.parametrize(
    "text",
    [CHATS[0], CHATS[6], LISTS[1], CODE[0], LANGUAGES[0], LANGUAGES[3], LANGUAGES[10]],
    ids=["chat", "arithmetic", "list", "code", "japanese", "arabic", "emoji"],
)
def test_one_by_one_until_the_end_of_text(
    oracle: Server, cases: dict[str, Case], text: str
) -> None:
    case = cases[text]
    expected = case.until(END)
    answer = oracle.generate(case.prompt, max_new_tokens=NUM_TOKENS)
    assert answer["output_ids"] == expected
    ended = expected[-1] == END
    assert answer["meta_info"]["finish_reason"]["type"] == ("stop" if ended else "length")
    assert answer["meta_info"]["completion_tokens"] == len(expected)
    assert answer["meta_info"]["spec_verify_ct"] == len(case.accepts(len(expected)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_very_short_answers(oracle: Server, cases: dict[str, Case], count: int) -> None:
    chosen = list(cases.values())[::6]
    answers = oracle.generate([case.prompt for case in chosen], max_new_tokens=count)
    for case, answer in zip(chosen, answers):
        assert answer["output_ids"] == case.completion[:count]
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": count}


def test_cached_prompt(oracle: Server, cases: dict[str, Case]) -> None:
    case = cases[LONG]
    flush_cache(oracle)
    for cached in (0, len(case.prompt) - 1):
        answer = oracle.generate(case.prompt, max_new_tokens=40, ignore_eos=True)
        assert answer["meta_info"]["cached_tokens"] == cached
        assert answer["output_ids"] == case.completion[:40]
        accepts = case.accepts(40)
        assert answer["meta_info"]["spec_correct_drafts_histogram"] == histogram(accepts)


def test_shared_prefixes_and_generated_prefixes(oracle: Server, cases: dict[str, Case]) -> None:
    case = cases[LONG]
    flush_cache(oracle)
    oracle.generate(case.prompt, max_new_tokens=60, ignore_eos=True)
    # Branches off within the prompt, continues what was generated, and runs past it.
    cuts = (57, len(case.prompt) + 33, len(case.prompt) + 70)
    sequence = case.prompt + case.completion
    answers = oracle.generate([sequence[:cut] for cut in cuts], max_new_tokens=24, ignore_eos=True)
    for cut, answer in list(zip(cuts, answers))[1:]:
        assert answer["output_ids"] == sequence[cut : cut + 24]
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached[0] == 56
    assert cached[1] == cuts[1] - 1
    assert len(case.prompt) + 59 <= cached[2] < cuts[2]
