"""Clients that people use drive a FLASHMAP server: the OpenAI package and upstream's benchmark."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from e2e_cases import END, Case
from e2e_prompts import CHATS, COPIES, LISTS, RAW
from serving import Server


@pytest.fixture
def client(oracle: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{oracle.url}/v1", api_key="none")


@pytest.mark.parametrize(
    ("text", "most", "reason"),
    [(LISTS[0], 100, "stop"), (CHATS[1], 20, "length")],
    ids=["to-the-end", "cut"],
)
def test_streamed_chat(
    client: openai.OpenAI,
    tokenizer: Any,
    cases: dict[str, Case],
    text: str,
    most: int,
    reason: str,
) -> None:
    case = cases[text]
    tokens = case.until(END)[:most]
    chunks = list(
        client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": text}],
            temperature=0,
            max_tokens=most,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    answer = "".join(choice.delta.content or "" for choice in choices)
    assert answer == tokenizer.decode(tokens, skip_special_tokens=True)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [reason]
    # A step's tokens come as one event.
    assert len(choices) < len(tokens)
    usage = chunks[-1].usage
    assert usage.completion_tokens == len(tokens)
    assert usage.prompt_tokens == len(case.prompt)
    assert usage.total_tokens == len(case.prompt) + len(tokens)


def test_completions_with_logprobs(
    client: openai.OpenAI, tokenizer: Any, cases: dict[str, Case]
) -> None:
    case = cases[COPIES[1]]
    answer = client.completions.create(
        model="default", prompt=COPIES[1], max_tokens=24, temperature=0, logprobs=2, stop=[" four"]
    )
    (choice,) = answer.choices
    full = tokenizer.decode(case.completion[:24])
    assert choice.text == full[: full.index(" four")]
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.token_logprobs) == answer.usage.completion_tokens


def test_unsupported_parameters_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="default", prompt="a", temperature=-1)


def test_benchmark_reports_the_accept_length(oracle: Server, smollm: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    turns = [[{"content": text}, {"content": "-"}] for text in RAW]
    data.write_text("".join(json.dumps({"conversations": turn}) + "\n" for turn in turns))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"),
            *("--base-url", oracle.url, "--tokenizer", smollm),
            *("--dataset-name", "custom", "--dataset-path", data, "--num-prompts", str(len(RAW))),
            *("--sharegpt-output-len", "64", "--output-file", tmp_path / "result.jsonl"),
        ],
        capture_output=True,
        text=True,
        env=oracle.env,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads((tmp_path / "result.jsonl").read_text())
    assert report["completed"] == len(RAW)
    assert report["total_output_tokens"] == 64 * len(RAW)
    printed = re.search(r"Accept length: +([0-9.]+)", result.stdout)
    assert printed and 1.5 < float(printed[1]) < 17
    assert report["accept_length"] == pytest.approx(float(printed[1]), abs=0.01)
