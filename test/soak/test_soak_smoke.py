"""A minute of the soak on one server: load with faults, fuzzed requests, and exact accounting."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server
from soak_catalog import Request, at_the_limit, catalog, seeded
from soak_client import ask
from soak_phases import fuzzed_requests, limits, load, submit, watched
from soak_report import Phase
from soak_servers import BLOCK_SIZE, Models, answer_all, metrics

CONTEXT = 64
ARGS = ("--context-length", CONTEXT, "--max-total-tokens", 2048, "--max-running-requests", 16)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def asked(models: Models) -> tuple[list[Request], list[Request]]:
    """Requests of all kinds, and some around the context limit; what is greedy has the answer of a
    server without speculation."""
    requests = catalog(60, context=CONTEXT, seed=1)
    edges = at_the_limit(CONTEXT, seed=1)
    # Overlapped with the next step, plain decoding misses a token in its penalties.
    with models.plain(*ARGS, "--disable-overlap-schedule") as plain:
        answer_all(plain, [request for request in requests if request.greedy])
        answer_all(plain, edges, refused=True)
    return requests, edges


@pytest.fixture(scope="module")
def requests(asked: tuple[list[Request], list[Request]]) -> list[Request]:
    return asked[0]


@pytest.fixture(scope="module")
def server(models: Models, requests: list[Request]) -> Iterator[Server]:
    oracle = models.oracle([request for request in requests if request.greedy])
    with models.flashmap(oracle, *ARGS) as started:
        yield started


def assert_faultless(phase: Phase) -> None:
    assert not phase.faults, phase


def test_mixed_requests(server: Server, requests: list[Request]) -> None:
    with watched(server, "mixed") as phase:
        load(server, phase, requests, 80, seed=1)
    assert_faultless(phase)


def test_aborts_and_lost_clients(server: Server, requests: list[Request]) -> None:
    with watched(server, "faults") as phase:
        load(server, phase, requests, 80, seed=2, faults=0.5)
    assert_faultless(phase)
    assert phase.aborted > 10


def test_requests_that_end_at_the_context_limit(
    server: Server, asked: tuple[list[Request], list[Request]]
) -> None:
    with watched(server, "limits") as phase:
        limits(server, phase, asked[1])
    assert_faultless(phase)
    assert 0 < phase.refused < phase.requests


def test_fuzzed_requests(server: Server, requests: list[Request]) -> None:
    with watched(server, "fuzz") as phase:
        fuzzed_requests(server, phase, 60, requests)
    assert_faultless(phase)


# --- overlap scheduling ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def overlapped(models: Models, server: Server) -> Iterator[Server]:
    """Another server of the same draft, whose scheduler sees results one step late."""
    with models.flashmap(models.folder / "oracle", *ARGS, overlapped=True) as started:
        assert "'disable_overlap_schedule': False" in started.log()
        yield started


def test_overlapped_requests(overlapped: Server, requests: list[Request]) -> None:
    """All kinds, penalties and grammars among them, with aborts and lost clients between."""
    with watched(overlapped, "overlapped") as phase:
        load(overlapped, phase, requests, 120, seed=3, faults=0.3)
    assert_faultless(phase)


def test_overlapped_seeds(server: Server, overlapped: Server) -> None:
    """From the first token on, what is drawn does not depend on the schedule."""
    drawn = seeded(16, context=CONTEXT, seed=5)
    answer_all(server, drawn)
    with watched(overlapped, "seeds") as phase:
        load(overlapped, phase, drawn, 2 * len(drawn), seed=5)
    assert_faultless(phase)


# --- accounting ------------------------------------------------------------------------------


def check_identities(meta: dict[str, Any], tokens: int) -> None:
    """What the numbers of one answer must satisfy, whichever way it ended."""
    assert meta["completion_tokens"] == tokens
    if tokens <= 1:
        assert "spec_verify_ct" not in meta
        return
    histogram, steps = meta["spec_correct_drafts_histogram"], meta["spec_verify_ct"]
    correct = sum(length * count for length, count in enumerate(histogram))
    assert sum(histogram) == steps and histogram[-1] > 0 and len(histogram) <= BLOCK_SIZE + 1
    assert meta["spec_num_correct_drafts"] == correct
    assert meta["spec_num_proposed_drafts"] == BLOCK_SIZE * steps
    assert meta["spec_accept_rate"] == pytest.approx(correct / (BLOCK_SIZE * steps))
    assert meta["spec_accept_length"] == pytest.approx(tokens / steps)
    # The prefill gives one token, a step its drafts and one more; the end may cut the last step.
    cut = 1 + correct + steps - tokens
    assert 0 <= cut < len(histogram)


def test_meta_info_adds_up(server: Server, requests: list[Request]) -> None:
    seen = set()
    for request in requests:
        if request.greedy:
            answer = ask(server.port, "/generate", request.payload).answer
            check_identities(answer["meta_info"], len(answer["output_ids"]))
            seen.add(answer["meta_info"]["finish_reason"]["type"])
    assert seen == {"length", "stop"}


def test_counters_are_the_sum_of_the_answers(server: Server, requests: list[Request]) -> None:
    chosen = [request for request in requests if request.greedy][:20]
    before = metrics(server)
    metas = [ask(server.port, "/generate", r.payload).answer["meta_info"] for r in chosen]
    after = metrics(server)
    for counter, key in {
        "generation_tokens_total": "completion_tokens",
        "prompt_tokens_total": "prompt_tokens",
        "spec_verify_calls_total": "spec_verify_ct",
    }.items():
        assert after[counter] - before[counter] == sum(meta.get(key, 0) for meta in metas)
    assert after["num_requests_total"] - before["num_requests_total"] == len(chosen)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_streams_chunks_add_up(server: Server, requests: list[Request], path: str) -> None:
    for request in [r for r in requests if r.kind in ("free", "stopping")][:6]:
        expected = request.expected
        if path == "/generate":
            events = list(server.stream(path, request.payload))
            lengths = [len(event["output_ids"]) for event in events]
            assert lengths == sorted(lengths)
            assert [e["meta_info"]["completion_tokens"] for e in events] == lengths
            assert events[-1]["output_ids"] == expected["output_ids"]
            continue
        params = dict(request.params)
        asked = dict(
            model="m",
            prompt=request.payload["input_ids"],
            max_tokens=params.pop("max_new_tokens"),
            **params,
        )
        options = dict(include_usage=True, continuous_usage_stats=True)
        events = list(server.stream(path, asked | dict(stream_options=options)))
        whole = ask(server.port, path, asked).answer
        text = "".join(e["choices"][0]["text"] for e in events if e["choices"])
        assert text == whole["choices"][0]["text"] == expected["text"]
        for usage in (events[-1]["usage"], whole["usage"]):
            assert usage["completion_tokens"] == len(expected["output_ids"])
            assert usage["prompt_tokens"] == len(request.payload["input_ids"])
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_aborted_answers_add_up(server: Server) -> None:
    rng = random.Random(0)
    for index in range(4):
        prompt = rng.choices(range(1, 95), k=4)
        params = dict(temperature=0, max_new_tokens=CONTEXT - 8, ignore_eos=True)
        request = Request("long", dict(input_ids=prompt, sampling_params=params))
        answer = submit(server, request, f"ends-{index}", "abort", rng).answer
        check_identities(answer["meta_info"], len(answer["output_ids"]))
