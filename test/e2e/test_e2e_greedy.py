"""Greedy answers with FLASHMAP are the token ids that the server gives without it."""

from __future__ import annotations

from collections import Counter

import pytest
from e2e_cases import BLOCK_SIZE, CORRUPTION, NUM_TOKENS, Case
from serving import Server

from drafts.replay import predicted_accepts


def histogram(accepts: list[int]) -> list[int]:
    counts = Counter(accepts)
    return [counts[length] for length in range(max(accepts) + 1)]


def test_one_batch_of_all_prompts(oracle: Server, cases: list[Case]) -> None:
    prompts = [list(case.prompt) for case in cases]
    answers = oracle.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    total: Counter[int] = Counter()
    for case, answer in zip(cases, answers):
        assert answer["output_ids"] == case.answer["output_ids"][:NUM_TOKENS]
        accepts = predicted_accepts(
            case.reference, CORRUPTION, num_drafts=BLOCK_SIZE, num_tokens=NUM_TOKENS
        )
        assert answer["meta_info"]["spec_correct_drafts_histogram"] == histogram(accepts)
        assert answer["meta_info"]["spec_verify_ct"] == len(accepts)
        total.update(accepts)
    assert {0, BLOCK_SIZE} < set(total), "no full reject or no full accept was exercised"
    assert len(total) > BLOCK_SIZE // 2
