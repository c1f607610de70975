"""Requests that no sane client sends: wrong types, absurd sizes, no numbers, broken JSON."""

from __future__ import annotations

import json
import random
from typing import Any, Callable

SAMPLING_FIELDS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop",
    "stop_token_ids", "stop_regex", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval",
    "logit_bias", "sampling_seed", "custom_params", "n", "beam_width", "watermark", "surprise",
)  # fmt: skip
GENERATE_FIELDS = (
    "text", "input_ids", "input_embeds", "rid", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "stream", "lora_path",
    "session_params", "custom_logit_processor", "return_hidden_states", "bootstrap_host",
    "priority", "sampling_params", "data_parallel_rank", "no_logs", "extra_key", "surprise",
)  # fmt: skip
CHAT_FIELDS = (
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n",
    "stop", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "seed", "user",
    "response_format", "tools", "tool_choice", "frequency_penalty", "presence_penalty",
    "continue_final_message", "chat_template_kwargs", "reasoning_effort", "ebnf", "regex",
)  # fmt: skip
COMPLETION_FIELDS = (
    "model", "prompt", "max_tokens", "temperature", "top_p", "n", "best_of", "stop", "stream",
    "stream_options", "logprobs", "echo", "suffix", "logit_bias", "seed", "json_schema", "regex",
    "ebnf", "min_tokens", "ignore_eos", "stop_token_ids",
)  # fmt: skip
VALID: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/generate": (
        dict(input_ids=[40, 41, 42], sampling_params=dict(max_new_tokens=8, temperature=0)),
        GENERATE_FIELDS,
    ),
    "/v1/chat/completions": (
        dict(model="m", messages=[dict(role="user", content="Hello")], max_tokens=8),
        CHAT_FIELDS,
    ),
    "/v1/completions": (dict(model="m", prompt="Hello", max_tokens=8), COMPLETION_FIELDS),
}
NUMBERS = (0, -0.0, 1, -1, 2, 0.5, 1e-9, 1e9, -1e9, 1e308, 2**31 - 1, 2**31, -(2**31) - 1, 2**63,
           2**64, 10**40, float("nan"), float("inf"), float("-inf"))  # fmt: skip
TEXTS = ("", " ", "a", "-1", "nan", "\0", "\ud800", "\U0001f431" * 50, "é" * 5000, "([", "(a+)+$",
         "{7", '{"type": "integer"}', "[0-9]{1,3}", "root ::= root", "../../etc/passwd",
         "true", "DISABLED", "{{ x }}", "%s%n", "\\", "\u202e" * 9)  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, also those that JSON has no name for."""
    makers: list[Callable[[], Any]] = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.randint(-400, 400),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice((None, True, False)),
        lambda: [rng.randint(-9, 400) for _ in range(rng.choice((0, 1, 9, 500)))],
    ]
    if depth < 3:
        makers += [
            lambda: [value(rng, depth + 1) for _ in range(rng.randint(0, 4))],
            lambda: {
                str(rng.choice((*TEXTS, *NUMBERS, "type", "role", "content"))): value(
                    rng, depth + 1
                )
                for _ in range(rng.randint(0, 4))
            },
        ]
    return rng.choice(makers)()


def nested(rng: random.Random) -> bytes:
    depth = rng.choice((50, 5000))
    return b'{"input_ids": ' + b"[" * depth + b"1" + b"]" * depth + b"}"


def broken(rng: random.Random, body: bytes) -> bytes:
    """The body with bytes cut off, changed or put in."""
    place = rng.randrange(len(body) + 1)
    return rng.choice(
        (
            body[:place],
            body[:place] + bytes([rng.randrange(256)]) + body[place:],
            body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :],
            b"",
            bytes(rng.randrange(256) for _ in range(40)),
            nested(rng),
        )
    )


def fuzzed(rng: random.Random) -> tuple[str, bytes]:
    """Path and body of one request."""
    path = rng.choice(list(VALID))
    valid, fields = VALID[path]
    payload = json.loads(json.dumps(valid))
    for _ in range(rng.randint(1, 3)):
        if path == "/generate" and rng.random() < 0.6:
            payload.setdefault("sampling_params", {})
            if isinstance(payload["sampling_params"], dict):
                payload["sampling_params"][rng.choice(SAMPLING_FIELDS)] = value(rng)
        else:
            payload[rng.choice(fields)] = value(rng)
    body = json.dumps(payload).encode()
    return path, broken(rng, body) if rng.random() < 0.15 else body
