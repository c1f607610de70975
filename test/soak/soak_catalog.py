"""What the soak asks for: a fixed set of requests of every kind, small enough to know all answers.

A request is a `/generate` payload. Greedy ones have one right answer, that of a server without
speculation; seeded ones must always answer the same; of the others only the form is checked.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, Callable

# Context of the short version.
SHORT = 64
# One token per byte; 0 is the end of text.
PRINTABLE = range(1, 95)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = (
    dict(json_schema=json.dumps(_SCHEMA)),
    dict(regex="[A-Z][a-z]{2,8} [0-9]{4}-[0-9]{2}"),
    dict(ebnf='root ::= ("yes" | "no") ", " [a-z] [a-z] [a-z] "."'),
)


@dataclass
class Request:
    """A payload and the answer it must get, once known."""

    kind: str
    payload: dict[str, Any]
    expected: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def params(self) -> dict[str, Any]:
        return self.payload["sampling_params"]

    @property
    def greedy(self) -> bool:
        return self.params["temperature"] == 0


def _free(rng: random.Random, room: int) -> dict[str, Any]:
    return dict(max_new_tokens=rng.randint(2, room), ignore_eos=rng.random() < 0.7)


def _one_token(rng: random.Random, room: int) -> dict[str, Any]:
    return dict(max_new_tokens=1)


def _long(rng: random.Random, room: int) -> dict[str, Any]:
    return dict(max_new_tokens=room, ignore_eos=True)


def _penalised(rng: random.Random, room: int) -> dict[str, Any]:
    choices = [
        dict(frequency_penalty=round(rng.uniform(-2, 2), 2)),
        dict(presence_penalty=round(rng.uniform(-2, 2), 2)),
        dict(repetition_penalty=round(rng.uniform(0.6, 1.9), 2)),
        dict(min_new_tokens=rng.randint(1, room)),
    ]
    chosen = rng.sample(choices, rng.randint(1, 3))
    return dict(max_new_tokens=room) | {k: v for choice in chosen for k, v in choice.items()}


def _biased(rng: random.Random, room: int) -> dict[str, Any]:
    bias = {str(rng.choice(PRINTABLE)): rng.choice([-100, -5, 5]) for _ in range(6)}
    return dict(max_new_tokens=min(room, 40), ignore_eos=True, logit_bias=bias)


def _stopping(rng: random.Random, room: int) -> dict[str, Any]:
    stops = rng.choice(
        [
            dict(stop_token_ids=rng.sample(PRINTABLE, 6)),
            dict(stop=[chr(33 + rng.randrange(90)) for _ in range(3)]),
            dict(stop_regex="[a-e]"),
        ]
    )
    return dict(max_new_tokens=room, **stops)


def _constrained(rng: random.Random, room: int) -> dict[str, Any]:
    return dict(max_new_tokens=room, **rng.choice(GRAMMARS))


def _sampled(rng: random.Random, room: int) -> dict[str, Any]:
    filters = rng.choice([{}, dict(top_k=8), dict(top_p=0.8), dict(min_p=0.1)])
    return dict(temperature=rng.choice([0.5, 1.0, 2.0]), max_new_tokens=room, **filters)


def _sampled_grammar(rng: random.Random, room: int) -> dict[str, Any]:
    return _sampled(rng, room) | rng.choice(GRAMMARS)


KINDS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "free": _free,
    "one-token": _one_token,
    "long": _long,
    "penalised": _penalised,
    "biased": _biased,
    "stopping": _stopping,
    "constrained": _constrained,
    "logprobs": _free,
    "sampled": _sampled,
    "sampled-constrained": _sampled_grammar,
}


def catalog(size: int, *, context: int, seed: int) -> list[Request]:
    """`size` requests that fit into `context` tokens, all kinds in turn."""
    rng = random.Random(seed)
    stems = [rng.choices(PRINTABLE, k=rng.randint(2, context // 3)) for _ in range(8)]
    requests = []
    for index in range(size):
        kind = list(KINDS)[index % len(KINDS)]
        stem = rng.choice(stems)  # prompts share prefixes
        prompt = stem[: rng.randint(1, len(stem))] + rng.choices(PRINTABLE, k=rng.randint(1, 6))
        # The server keeps two positions of the context for itself.
        params = dict(temperature=0) | KINDS[kind](rng, context - len(prompt) - 2)
        payload: dict[str, Any] = dict(input_ids=prompt, sampling_params=params)
        if kind == "logprobs":
            payload |= dict(return_logprob=True, top_logprobs_num=rng.randint(0, 5))
        requests.append(Request(kind, payload))
    return requests


def identifiers(size: int, *, seed: int) -> list[Request]:
    """Greedy requests that hold an identifier of 64 hexadecimal digits, twice, to go on with it."""
    rng = random.Random(seed)
    digits = PRINTABLE[:16]
    requests = []
    for _ in range(size):
        identifier = rng.choices(digits, k=64)
        params = dict(temperature=0, max_new_tokens=64, ignore_eos=True)
        prompt = [*identifier, 90, *identifier[:32]]
        requests.append(Request("identifier", dict(input_ids=prompt, sampling_params=params)))
    return requests


def seeded(size: int, *, context: int, seed: int) -> list[Request]:
    """Sampled requests that carry a seed each."""
    rng = random.Random(seed)
    requests = []
    for index in range(size):
        prompt = rng.choices(PRINTABLE, k=rng.randint(1, context // 3))
        make = _sampled_grammar if index % 4 == 0 else _sampled
        params = make(rng, min(48, context - len(prompt) - 2)) | dict(
            sampling_seed=rng.randrange(2**31)
        )
        requests.append(Request("seeded", dict(input_ids=prompt, sampling_params=params)))
    return requests


def at_the_limit(context: int, *, seed: int) -> list[Request]:
    """Prompts and lengths that end one before, at and one past the context limit."""
    rng = random.Random(seed)
    requests = []
    for length in (1, context // 2, context - 18, context - 17, context - 3, context - 2,
                   context - 1, context, context + 1):  # fmt: skip
        prompt = rng.choices(PRINTABLE, k=length)
        for past in (-3, -2, -1, 0, 1, 1000):
            tokens = max(0, context - length + past)
            params = dict(temperature=0, max_new_tokens=tokens, ignore_eos=True)
            requests.append(Request("limit", dict(input_ids=prompt, sampling_params=params)))
    return requests
