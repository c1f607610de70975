"""What eval_draft.py makes of a server's answers; the server itself is not started here."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import eval_draft
import numpy as np
import pytest
from train.card import acceptance_table
from train.overlap import ngrams, seen_shares
from train.prompts import Prompt
from train.token_file import TokenFiles


class Engine:
    """Answers with given histograms."""

    def __init__(self, histograms: list[list[int]]) -> None:
        self.histograms, self.temperatures = histograms, []

    def generate(self, input_ids: Any, sampling_params: list[dict]) -> list[dict]:
        self.temperatures += [parameters["temperature"] for parameters in sampling_params]
        return [
            {"meta_info": {"spec_correct_drafts_histogram": row} if row else {}}
            for row in self.histograms
        ]


def test_histograms_become_accept_lengths_and_slots() -> None:
    prompts = [Prompt([1], "code"), Prompt([2], "code"), Prompt([3], "chat")]
    options = argparse.Namespace(temperatures=[0.0, 1.0], max_new_tokens=8)
    engine = Engine([[1, 1, 2], [1], []])
    result = eval_draft.evaluate(engine, prompts, 3, options)
    assert engine.temperatures == [0.0] * 3 + [1.0] * 3
    code = next(row for row in result["domains"] if row["domain"] == "code")
    assert code["prompts"] == 2 and code["histogram"] == [2, 1, 2]
    assert code["slots"] == pytest.approx([3 / 5, 2 / 5])
    assert code["accept_length"] == pytest.approx(2.0)
    assert "| code | 0 | 2 | 2.00 | 0.60 | 0.40 |" in acceptance_table(result)
    assert set(result["overall"]) == {"0", "1"}


def test_prompts_of_the_data_are_found(data: Path) -> None:
    files = TokenFiles([data])
    prompt = files[7].tokens[: files[7].prompt_length].tolist()
    other = [token + 1 for token in reversed(prompt)]
    assert seen_shares([prompt, other, prompt[:3]], files) == [1.0, 0.0, 1.0]


def test_ngrams_tell_windows_apart() -> None:
    tokens = np.array([1, 2, 3, 1, 2, 3, 4])
    hashes = ngrams(tokens, 3)
    assert len(hashes) == 5 and hashes[0] == hashes[3] and len(set(hashes.tolist())) == 4


def test_held_out_prompts_cover_five_domains() -> None:
    lines = [json.loads(line) for line in eval_draft.PROMPTS.read_text().splitlines()]
    assert Counter(line["domain"] for line in lines) == dict.fromkeys(
        ("chat", "code", "math", "copying", "multilingual"), 20
    )
    assert len({line["prompt"] for line in lines}) == 100
