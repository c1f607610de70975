"""Required tool calls, schemas, regular expressions and grammars among free text, 20 at a time."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import Server
from soak_client import ask

# Random weights would write white space between JSON's signs for ever.
WHITE = {str(token): -100 for token in (197, 198, 201, 220)}
NUMBER = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pay", "parameters": NUMBER}}
KINDS: dict[str, dict[str, Any]] = {
    "tool": dict(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, logit_bias=WHITE),
    "schema": dict(
        response_format=dict(type="json_schema", json_schema=dict(name="number", schema=NUMBER)),
        logit_bias=WHITE,
    ),
    "regex": dict(regex="[A-Z][a-z]{2,8} [0-9]{4}"),
    "ebnf": dict(ebnf='root ::= ("yes" | "no") ", " [a-z] [a-z] "."'),
    "free": dict(ignore_eos=True),
}
MOST = 56


def check(kind: str, choice: dict[str, Any]) -> None:
    """That an answer is whole and of its kind."""
    text = choice["message"]["content"]
    assert choice["finish_reason"] == ("length" if kind == "free" else "stop")
    if kind in ("tool", "schema"):
        found = json.loads(text)
        if kind == "tool":  # as text, since the server has no --tool-call-parser
            (call,) = found
            assert call["name"] == "pay"
            found = call["parameters"]
        assert set(found) == {"sum"} and 0 <= found["sum"] <= 99
    elif kind == "regex":
        assert re.fullmatch(KINDS[kind]["regex"], text)
    elif kind == "ebnf":
        assert re.fullmatch("(yes|no), [a-z]{2}[.]", text)


@pytest.mark.parametrize("temperature", [0, 0.2, 1], ids=["greedy", "cool", "hot"])
def test_all_parse(server: Server, temperature: float) -> None:
    def run(index: int) -> tuple[str, dict[str, Any]]:
        kind = list(KINDS)[index % len(KINDS)]
        chat = dict(messages=[dict(role="user", content=f"{index:02}")], max_tokens=MOST)
        asked = dict(model="m", temperature=temperature, **chat, **KINDS[kind])
        outcome = ask(server.port, "/v1/chat/completions", asked)
        assert outcome.status == 200, outcome
        return kind, outcome.answer

    with ThreadPoolExecutor(20) as pool:
        for kind, answer in pool.map(run, range(20)):
            check(kind, answer["choices"][0])
            if kind == "free":
                assert answer["usage"]["completion_tokens"] == MOST
