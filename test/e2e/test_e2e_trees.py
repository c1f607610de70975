"""Trees of 8 candidate blocks: the same greedy ids as without speculation, in fewer steps.

Pages of 16 and prompts prefilled in chunks of 64; the oracle's candidates are wrong in different
places, so a tree goes on where a chain ends, and accepted rows come from all over the window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
from drafts.folders import write_oracle
from drafts.replay import Reference, Shape
from e2e_cases import (
    BLOCK_SIZE,
    CORRUPTION,
    GRAMMARS,
    NUM_TOKENS,
    Case,
    assert_pool_is_free,
    check_grammar,
    flashmap_server,
    flush_cache,
    histogram,
    prompt_ids,
)
from e2e_prompts import BOOK, CHATS, LISTS, LONG
from serving import Server

TREE = Shape(BLOCK_SIZE, width=17, candidates=8)


@pytest.fixture(scope="module")
def trees(
    smollm: Path,
    untrained: Path,
    references: list[Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("drafts") / "trees"
    write_oracle(folder, untrained, references, CORRUPTION)
    with flashmap_server(
        smollm, folder,
        "--speculative-flashmap-tree-candidates", TREE.candidates,
        "--speculative-flashmap-tree-budget", 1024,  # all of them in every batch of this file
        "--speculative-flashmap-tree-temperature", 0.5,
        "--page-size", 16,
        "--chunked-prefill-size", 64,
        "--max-total-tokens", 16384,
    ) as server:  # fmt: skip
        yield server


def test_one_batch_of_all_prompts(trees: Server, cases: dict[str, Case]) -> None:
    prompts = [case.prompt for case in cases.values()]
    answers = trees.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    lengths = []
    for case, answer in zip(cases.values(), answers):
        assert answer["output_ids"] == case.completion[:NUM_TOKENS], case.text
        accepts = case.accepts(NUM_TOKENS, TREE)
        assert answer["meta_info"]["spec_correct_drafts_histogram"] == histogram(accepts), case.text
        lengths.append((len(accepts), len(case.accepts(NUM_TOKENS))))
    of_trees, of_chains = np.sum(lengths, axis=0)
    assert of_trees < 0.8 * of_chains, "trees need not many fewer steps than chains"
    assert_pool_is_free(trees)
