"""What a request can ask for works with FLASHMAP as without it, also where it cuts a block."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e_cases import END, GRAMMARS, Case, assert_pool_is_free, check_grammar, used_tokens
from e2e_prompts import CHATS, CODE, COPIES, LANGUAGES, LISTS
from serving import Server


def both(plain: Server, oracle: Server, payload: dict[str, Any]) -> tuple[Any, Any]:
    """Answers without and with FLASHMAP, both servers at work at once."""
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(s.request, "/generate", payload) for s in (plain, oracle)]
        return tuple(future.result() for future in futures)


# --- stops -----------------------------------------------------------------------------------

STOPS = {
    "word": (CHATS[1], dict(stop=["scattering"])),
    "in-a-word": (CHATS[3], dict(stop=["nabilit"])),
    "across-tokens": (LISTS[0], dict(stop=["les\n3."])),
    "newline": (LISTS[1], dict(stop=["\n"])),
    "several": (CODE[0], dict(stop=["never", "return 1"])),
    "kept": (COPIES[1], dict(stop=["six one"], no_stop_trim=True)),
    "unicode": (LANGUAGES[0], dict(stop=["ですか"])),
    "regex": (CODE[3], dict(stop_regex="n = [0-9]+")),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_in_the_middle_of_a_block(
    plain: Server, oracle: Server, cases: dict[str, Case], name: str
) -> None:
    text, stop = STOPS[name]
    params = dict(temperature=0, max_new_tokens=100, ignore_eos=True, **stop)
    expected, answer = both(
        plain, oracle, dict(input_ids=cases[text].prompt, sampling_params=params)
    )
    assert expected["meta_info"]["finish_reason"]["type"] == "stop", "the case does not stop"
    assert answer["text"] == expected["text"]
    assert answer["output_ids"] == expected["output_ids"]
    for key in ("finish_reason", "completion_tokens"):
        assert answer["meta_info"][key] == expected["meta_info"][key]
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
    assert cuts_a_block(cases[text], answer), "choose a stop within an accepted block"


def cuts_a_block(case: Case, answer: dict[str, Any]) -> bool:
    """Whether the last step accepted more than the answer holds."""
    steps = case.accepts(100)[: answer["meta_info"]["spec_verify_ct"]]
    return 1 + sum(steps) + len(steps) > len(answer["output_ids"])


def test_stop_tokens(plain: Server, oracle: Server, cases: dict[str, Case]) -> None:
    case = cases[CODE[0]]
    token = case.completion[41]
    params = dict(temperature=0, max_new_tokens=100, stop_token_ids=[token])
    expected, answer = both(plain, oracle, dict(input_ids=case.prompt, sampling_params=params))
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["output_ids"] == case.completion[: case.completion.index(token) + 1]
    assert answer["text"] == expected["text"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert cuts_a_block(case, answer), "choose a stop within an accepted block"


# --- log-probabilities -----------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, "scattering"], ids=["whole", "stopped"])
def test_logprobs(plain: Server, oracle: Server, cases: dict[str, Case], stop: str | None) -> None:
    params = dict(temperature=0, max_new_tokens=40, ignore_eos=True, stop=stop)
    payload = dict(
        input_ids=cases[CHATS[1]].prompt,
        sampling_params=params,
        return_logprob=True,
        top_logprobs_num=5,
        token_ids_logprob=[2, 198],
    )
    expected, answer = (a["meta_info"] | a for a in both(plain, oracle, payload))
    assert answer["output_ids"] == expected["output_ids"]
    names = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    for name in names:
        assert len(answer[name]) == answer["completion_tokens"] == len(answer["output_ids"])
    assert [entry[1] for entry in answer[names[0]]] == answer["output_ids"]
    assert logprobs(answer[names[0]]) == pytest.approx(logprobs(expected[names[0]]), abs=1e-2)
    for name in names[1:]:
        for mine, theirs in zip(answer[name], expected[name]):
            assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=1e-2)
    assert min(logprobs(answer[names[0]])) < -0.1, "the case has no uncertain token"


def logprobs(entries: list[list[Any]]) -> list[float]:
    return [entry[0] for entry in entries]


# --- constraints -----------------------------------------------------------------------------


def test_grammars_mixed_with_free_text(
    oracle: Server, cases: dict[str, Case], constrained: dict[str, Case]
) -> None:
    chosen = [cases[CODE[4]], *constrained.values()]
    params = [
        dict(temperature=0, max_new_tokens=100, **GRAMMARS.get(case.text, {})) for case in chosen
    ]
    answers = oracle.request(
        "/generate", dict(input_ids=[case.prompt for case in chosen], sampling_params=params)
    )
    assert answers[0]["output_ids"] == chosen[0].until(END)[:100]
    for case, answer in zip(chosen[1:], answers[1:]):
        assert answer["output_ids"] == case.completion
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        check_grammar(case.text, answer["text"])
        assert answer["meta_info"]["spec_verify_ct"] < len(case.completion) / 2


def test_banned_tokens(plain: Server, oracle: Server, cases: dict[str, Case]) -> None:
    case = cases[LISTS[0]]
    banned = sorted(set(case.completion[:16:3]))
    bias = {str(token): -100 for token in banned}
    params = [
        dict(temperature=t, max_new_tokens=16, ignore_eos=True, logit_bias=bias) for t in (0, 1)
    ]
    payload = dict(input_ids=[case.prompt] * 2, sampling_params=params)
    expected, answers = both(plain, oracle, payload)
    assert answers[0]["output_ids"] == expected[0]["output_ids"]
    for answer in answers:
        assert not set(answer["output_ids"]) & set(banned)


def test_top_k_of_one_is_greedy(oracle: Server, cases: dict[str, Case]) -> None:
    case = cases[CHATS[2]]
    params = dict(temperature=1, top_k=1, max_new_tokens=24, ignore_eos=True)
    # Beside a request that is sampled, so that the batch takes the sampled path.
    prompts = [case.prompt] * 10 + [cases[CHATS[3]].prompt]
    answers = oracle.request(
        "/generate",
        dict(
            input_ids=prompts,
            sampling_params=[params] * 10 + [params | dict(top_k=40, max_new_tokens=8)],
        ),
    )
    for answer in answers[:10]:
        assert answer["output_ids"] == case.completion[:24]
        assert answer["meta_info"]["spec_verify_ct"] == len(case.accepts(24))


# --- aborts ----------------------------------------------------------------------------------


def stream(server: Server, payload: dict[str, Any], first: threading.Event) -> dict[str, Any]:
    """The last event of a streamed answer; `first` is set when the first one came."""
    last: dict[str, Any] = {}
    for event in server.stream("/generate", payload):
        last = event
        first.set()
    return last


def test_aborts_in_the_middle_of_a_batch(oracle: Server, cases: dict[str, Case]) -> None:
    kept = [cases[text] for text in (CHATS[0], LISTS[2], CODE[3], LANGUAGES[1])]
    started = [threading.Event() for _ in range(3)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        doomed = [
            pool.submit(
                stream,
                oracle,
                dict(
                    text=f"Count to {1000 + i}: ",
                    rid=f"doomed-{i}",
                    sampling_params=dict(temperature=0, max_new_tokens=3000, ignore_eos=True),
                ),
                event,
            )
            for i, event in enumerate(started)
        ]
        for event in started:
            assert event.wait(120)
        prompts = [case.prompt for case in kept]
        answers = pool.submit(oracle.generate, prompts, max_new_tokens=60, ignore_eos=True)
        assert used_tokens(oracle) > 0
        for i in (0, 1):
            oracle.request("/abort_request", {"rid": f"doomed-{i}"})
            time.sleep(0.3)
        for case, answer in zip(kept, answers.result()):
            assert answer["output_ids"] == case.completion[:60], case.text
        oracle.request("/abort_request", {"rid": "doomed-2"})
        for future in doomed:
            assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert_pool_is_free(oracle)


# --- refused requests ------------------------------------------------------------------------


def refusal(server: Server, path: str, body: bytes) -> tuple[int, str]:
    """Status and message of a request that is refused."""
    request = urllib.request.Request(
        server.url + path, data=body, headers={"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    return error.value.code, error.value.read().decode()


MALFORMED = {
    "not-json": ("/generate", b'{"text": "Hello"'),
    "no-prompt": ("/generate", b"{}"),
    "empty-prompt": ("/generate", b'{"input_ids": []}'),
    "wrong-type": ("/generate", b'{"text": "Hello", "sampling_params": {"temperature": "hot"}}'),
    "negative-temperature": ("/generate", b'{"text": "a", "sampling_params": {"temperature": -1}}'),
    "top-p-of-7": ("/generate", b'{"text": "Hello", "sampling_params": {"top_p": 7}}'),
    "token-outside": ("/generate", b'{"input_ids": [1, 99999999]}'),
    "negative-token": ("/generate", b'{"input_ids": [1, -5]}'),
    "huge-prompt": ("/generate", json.dumps({"input_ids": [5] * 20000}).encode()),
    "bad-regex": ("/generate", b'{"text": "Hello", "sampling_params": {"regex": "(["}}'),
    "bad-schema": ("/generate", b'{"text": "a", "sampling_params": {"json_schema": "{7"}}'),
    "chat-without-messages": ("/v1/chat/completions", b'{"model": "m"}'),
    "samples-without-end": ("/generate", b'{"text": "a", "sampling_params": {"n": 1000000000}}'),
    "no-samples": ("/generate", b'{"text": "a", "sampling_params": {"n": 0}}'),
    "more-logprobs-than-tokens": (
        "/generate",
        b'{"text": "Hello", "return_logprob": true, "top_logprobs_num": 10000000}',
    ),
    "penalty-of-7": ("/generate", b'{"text": "a", "sampling_params": {"presence_penalty": 7}}'),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(oracle: Server, cases: dict[str, Case], name: str) -> None:
    status, _ = refusal(oracle, *MALFORMED[name])
    assert 400 <= status < 500
    case = cases[CHATS[0]]
    assert oracle.generate(case.prompt, max_new_tokens=4)["output_ids"] == case.completion[:4]


# --- weights and memory ----------------------------------------------------------------------

@pytest.mark.parametrize("source", ["disk", "tensor", "ipc"])
def test_new_weights_are_refused(
    oracle: Server, smollm: Path, cases: dict[str, Case], source: str
) -> None:
    """They would leave the draft's products with the old ones stale."""
    from sglang.srt.utils import MultiprocessingSerializer

    nothing = MultiprocessingSerializer.serialize([], output_str=True)
    updates = {
        "disk": dict(model_path=str(smollm)),
        "tensor": dict(serialized_named_tensors=[nothing]),
        "ipc": dict(zmq_handles={}),
    }
    if source == "tensor":
        oracle.request("/begin_weight_update", {})
    body = json.dumps(updates[source]).encode()
    status, message = refusal(oracle, f"/update_weights_from_{source}", body)
    if source == "tensor":
        oracle.request("/end_weight_update", {})
    assert status == 400 and "restart the server with the new weights" in message
    case = cases[CHATS[0]]
    assert oracle.generate(case.prompt, max_new_tokens=4)["output_ids"] == case.completion[:4]


def test_sleep_and_wake(oracle: Server, cases: dict[str, Case]) -> None:
    """Without a memory saver only the cache is given away; the same text comes afterwards."""
    case = cases[CHATS[1]]
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        oracle.request(path, {})
    answer = oracle.generate(case.prompt, max_new_tokens=24)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == case.completion[:24]
