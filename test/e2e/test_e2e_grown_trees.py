"""Trees grown from what the shipped draft says of each slot: greedy ids as without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cases import NUM_TOKENS, Case, assert_pool_is_free, flashmap_server
from serving import Server

SHIPPED = Path(__file__).resolve().parents[2] / "drafts/smollm2-135m-instruct"


@pytest.fixture(scope="module")
def grown(smollm: Path) -> Iterator[Server]:
    with flashmap_server(
        smollm, SHIPPED,
        "--speculative-flashmap-tree-candidates", 1,
        "--speculative-flashmap-tree-choices", 8,
        "--speculative-num-draft-tokens", 17,
        "--max-total-tokens", 16384,
    ) as server:  # fmt: skip
        yield server


def test_one_batch_of_all_prompts(grown: Server, cases: dict[str, Case]) -> None:
    prompts = [case.prompt for case in cases.values()]
    answers = grown.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    depths = []
    for case, answer in zip(cases.values(), answers):
        assert answer["output_ids"] == case.completion[:NUM_TOKENS], case.text
        depths.append(len(answer["meta_info"]["spec_correct_drafts_histogram"]) - 1)
    assert max(depths) > 2, "no tree was ever followed"
    assert_pool_is_free(grown)
