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
from e2e_prompts import BOOK, CHATS, LISTS, LONG, domain
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
        "--decode-log-interval", 8,
    ) as server:  # fmt: skip
        yield server


def test_one_batch_of_all_prompts(trees: Server, cases: dict[str, Case]) -> None:
    prompts = [case.prompt for case in cases.values()]
    answers = trees.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    steps: dict[str, list[tuple[int, int]]] = {}
    for case, answer in zip(cases.values(), answers):
        assert answer["output_ids"] == case.completion[:NUM_TOKENS], case.text
        accepts = case.accepts(NUM_TOKENS, TREE)
        assert answer["meta_info"]["spec_correct_drafts_histogram"] == histogram(accepts), case.text
        steps.setdefault(domain(case.text), []).append(
            (len(accepts), len(case.accepts(NUM_TOKENS)))
        )
    for name, counts in steps.items():
        of_trees, of_chains = np.sum(counts, axis=0)
        assert of_trees < 0.8 * of_chains, f"{name}: trees need not many fewer steps than chains"
    assert_pool_is_free(trees)


def test_branches_off_generated_text(trees: Server, cases: dict[str, Case]) -> None:
    """Moved KV is read again: the radix cache serves prefixes that a tree's steps committed."""
    case = cases[LONG]
    flush_cache(trees)
    trees.generate(case.prompt, max_new_tokens=80, ignore_eos=True)
    sequence = case.prompt + case.completion
    cuts = (len(case.prompt) + 33, len(case.prompt) + 60, len(case.prompt) + 90)
    answers = trees.generate([sequence[:cut] for cut in cuts], max_new_tokens=24, ignore_eos=True)
    for cut, answer in zip(cuts, answers):
        assert answer["output_ids"] == sequence[cut : cut + 24]
        cached = answer["meta_info"]["cached_tokens"]
        assert cached >= min(cut, len(case.prompt) + 79) // 16 * 16 - 16
        # What a cached prefix gives must be what prefilling it anew gives.
    flush_cache(trees)
    anew = trees.generate([sequence[:cut] for cut in cuts], max_new_tokens=24, ignore_eos=True)
    assert [a["output_ids"] for a in anew] == [a["output_ids"] for a in answers]


@pytest.mark.parametrize("stop", [None, "scattering"], ids=["whole", "stopped"])
def test_logprobs(plain: Server, trees: Server, cases: dict[str, Case], stop: str | None) -> None:
    payload = dict(
        input_ids=cases[CHATS[1]].prompt,
        sampling_params=dict(temperature=0, max_new_tokens=40, ignore_eos=True, stop=stop),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
        token_ids_logprob=[5, 500, 5000],
    )
    expected, answer = (server.request("/generate", payload) for server in (plain, trees))
    assert answer["output_ids"] == expected["output_ids"]
    for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        for part, tokens in (("input", payload["input_ids"]), ("output", answer["output_ids"])):
            found = [a["meta_info"][f"{part}_{kind}"] for a in (answer, expected)]
            assert [len(values) for values in found] == [len(tokens)] * 2
            # Nothing is said of a prompt's first token.
            mine, theirs = (np.array(f[part == "input" :])[..., 0].astype(float) for f in found)
            np.testing.assert_allclose(mine, theirs, atol=1e-2)
    assert answer["meta_info"]["spec_verify_ct"] < expected["meta_info"]["completion_tokens"] / 2


@pytest.mark.parametrize("temperature", [0, 0.4, 0.9], ids=["greedy", "match", "rejection"])
def test_grammars_mixed_with_free_text(
    trees: Server, cases: dict[str, Case], constrained: dict[str, Case], tokenizer: Any,
    temperature: float,
) -> None:  # fmt: skip
    names = [*GRAMMARS, "free"]
    params = [
        dict(temperature=temperature, max_new_tokens=100, **GRAMMARS.get(name, {}))
        for name in names
    ]
    prompt = prompt_ids(tokenizer, BOOK)
    answers = trees.request(
        "/generate", dict(input_ids=[prompt] * len(names), sampling_params=params)
    )
    for name, answer in list(zip(names, answers))[:-1]:
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        check_grammar(name, answer["text"])
        if temperature == 0:
            assert answer["output_ids"] == constrained[name].completion


def test_all_rules_in_one_batch(trees: Server, cases: dict[str, Case]) -> None:
    """Greedy requests keep their text, and seeded ones theirs, on trees and on chains."""
    chosen = [cases[CHATS[0]], cases[LISTS[1]]]
    seeded = [
        dict(temperature=t, sampling_seed=11, max_new_tokens=24, ignore_eos=True)
        for t in (0.4, 1.0)
    ]
    alone = [
        trees.request("/generate", dict(input_ids=chosen[0].prompt, sampling_params=params))
        for params in seeded
    ]
    free = dict(temperature=0.7, top_p=0.9, max_new_tokens=24, ignore_eos=True)
    greedy = dict(temperature=0, max_new_tokens=24, ignore_eos=True)
    batch = trees.request(
        "/generate",
        dict(
            input_ids=[chosen[0].prompt] * 2 + [case.prompt for case in chosen] * 2,
            sampling_params=[*seeded, greedy, greedy, free, free],
        ),
    )
    assert [a["output_ids"] for a in batch[:2]] == [a["output_ids"] for a in alone]
    for case, answer in zip(chosen, batch[2:4]):
        assert answer["output_ids"] == case.completion[:24]
    rules = [answer["meta_info"]["spec_tree"]["rule"] for answer in batch]
    assert rules == ["match", "rejection", "greedy", "greedy", "rejection", "rejection"]
    for answer in batch:
        check_statistics(answer["meta_info"]["spec_tree"])
    assert_pool_is_free(trees)


def check_statistics(found: dict[str, Any]) -> None:
    """A chain's counts are its own; those of a tree are averages within their bounds."""
    drafts, distinct = TREE.width - 1, found["distinct_candidates"]
    if found["rule"] == "rejection":
        assert found["verified"] == "chain"
        assert found["tree_nodes"] == BLOCK_SIZE + 1 and found["trie_nodes"] == BLOCK_SIZE
        return
    assert found["verified"] == "tree" and 1 < distinct <= TREE.candidates
    assert found["tree_nodes"] == drafts + 1 < found["trie_nodes"] <= distinct * BLOCK_SIZE


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_statistics_in_openai_answers(trees: Server, stream: bool) -> None:
    payload = dict(
        model="default",
        messages=[dict(role="user", content=CHATS[0])],
        temperature=0,
        max_tokens=12,
        stream=stream,
        return_spec_tokens_details=True,
    )
    path = "/v1/chat/completions"
    answers = trees.stream(path, payload) if stream else [trees.request(path, payload)]
    (details,) = (a["sglext"]["spec_tokens_details"] for a in answers if a.get("sglext"))
    assert details["spec_tree"]["rule"] == "greedy" and details["spec_verify_ct"] > 0
    check_statistics(details["spec_tree"])


def test_the_decode_log_counts_trees(trees: Server) -> None:
    assert "tree nodes: " in trees.log() and "verified by: " in trees.log()
