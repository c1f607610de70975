"""The numbers of an answer satisfy their identities, whichever way it ended and was asked for."""

from __future__ import annotations

import random
from typing import Any

import pytest
from serving import Server
from soak_catalog import SHORT, Request
from soak_client import ask
from soak_phases import submit
from soak_servers import BLOCK_SIZE, metrics


def check_identities(meta: dict[str, Any], tokens: int) -> None:
    """Of `meta_info`; `tokens`: ids in the answer."""
    assert meta["completion_tokens"] == tokens
    if tokens <= 1:
        assert "spec_verify_ct" not in meta
        return
    check_steps(meta, tokens)


def check_steps(counts: dict[str, Any], tokens: int) -> None:
    """Of the verify steps of an answer; a step proposes its chain or the nodes of its tree."""
    histogram, steps = counts["spec_correct_drafts_histogram"], counts["spec_verify_ct"]
    correct = sum(length * count for length, count in enumerate(histogram))
    assert sum(histogram) == steps and histogram[-1] > 0 and len(histogram) <= BLOCK_SIZE + 1
    assert counts["spec_num_correct_drafts"] == correct
    assert counts["spec_num_proposed_drafts"] == BLOCK_SIZE * steps
    assert counts["spec_accept_rate"] == pytest.approx(correct / (BLOCK_SIZE * steps))
    assert counts["spec_accept_length"] == pytest.approx(tokens / steps)
    # The prefill gives one token, a step its drafts and one more; the end may cut the last step.
    cut = 1 + correct + steps - tokens
    assert 0 <= cut < len(histogram)


def ending(request: Request, meta: dict[str, Any]) -> str:
    """How an answer ended."""
    reason = meta["finish_reason"]
    if reason["type"] != "stop":
        return reason["type"]
    if isinstance(reason["matched"], int):
        return "token" if reason["matched"] else "end of text"
    return "regex" if "stop_regex" in request.params else "text"


def test_every_ending_adds_up(server: Server, requests: list[Request]) -> None:
    seen = set()
    for request in requests:
        if request.greedy:
            answer = ask(server.port, "/generate", request.payload).answer
            check_identities(answer["meta_info"], len(answer["output_ids"]))
            seen.add(ending(request, answer["meta_info"]))
    assert seen == {"length", "token", "end of text", "text", "regex"}


def test_aborted_answers_add_up(server: Server) -> None:
    rng = random.Random(0)
    before = metrics(server).get("num_aborted_requests_total", 0)
    ends = []
    for index in range(4):
        prompt = rng.choices(range(1, 95), k=4)
        params = dict(temperature=0, max_new_tokens=SHORT - 8, ignore_eos=True)
        request = Request("long", dict(input_ids=prompt, sampling_params=params))
        outcome = submit(server, request, f"ends-{index}", "abort", rng)
        check_identities(outcome.answer["meta_info"], len(outcome.answer["output_ids"]))
        ends.append(outcome.finish)
    assert metrics(server).get("num_aborted_requests_total", 0) - before == ends.count("abort")


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


def test_a_streams_events_grow(server: Server, requests: list[Request]) -> None:
    for request in streamed(requests):
        events = list(server.stream("/generate", request.payload))
        lengths = [len(event["output_ids"]) for event in events]
        assert lengths == sorted(lengths)
        assert [event["meta_info"]["completion_tokens"] for event in events] == lengths
        check_identities(events[-1]["meta_info"], lengths[-1])
        assert events[-1]["output_ids"] == request.expected["output_ids"]


def test_usage_counts_what_is_streamed(server: Server, requests: list[Request]) -> None:
    for request in streamed(requests):
        expected, params = request.expected, dict(request.params)
        asked = dict(
            model="m",
            prompt=request.payload["input_ids"],
            max_tokens=params.pop("max_new_tokens"),
            return_spec_tokens_details=True,
            **params,
        )
        options = dict(include_usage=True, continuous_usage_stats=True)
        events = list(server.stream("/v1/completions", asked | dict(stream_options=options)))
        whole = ask(server.port, "/v1/completions", asked).answer
        text = "".join(e["choices"][0]["text"] for e in events if e["choices"])
        assert text == whole["choices"][0]["text"] == expected["text"]
        for usage in (events[-1]["usage"], whole["usage"]):
            assert usage["completion_tokens"] == len(expected["output_ids"])
            assert usage["prompt_tokens"] == len(request.payload["input_ids"])
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if len(expected["output_ids"]) > 1:
            check_steps(whole["sglext"]["spec_tokens_details"], len(expected["output_ids"]))


def streamed(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.kind in ("free", "stopping")][:6]
