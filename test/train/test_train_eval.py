"""What eval_draft.py makes of a server's answers; the server itself is not started here."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import eval_draft
import numpy as np
import pytest
from fork.errors import ForkError
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
    options = argparse.Namespace(
        temperatures=[0.0, 1.0], max_new_tokens=8, engine_arguments="{}"
    )
    engine = Engine([[1, 1, 2], [1], []])
    result = eval_draft.evaluate(engine, prompts, 3, options)
    assert engine.temperatures == [0.0] * 3 + [1.0] * 3
    code = next(row for row in result["domains"] if row["domain"] == "code")
    assert code["prompts"] == 2 and code["histogram"] == [2, 1, 2]
    assert code["slots"] == pytest.approx([3 / 5, 2 / 5])
    assert code["accept_length"] == pytest.approx(2.0)
    assert "| code | 0 | 2 | 2.00 | 0.60 | 0.40 |" in acceptance_table(result)
    assert set(result["overall"]) == {"0", "1"}


@pytest.fixture
def evaluations() -> dict[str, dict[str, Any]]:
    """Of two drafts that were verified three and two wide."""
    prompts = [Prompt([1], "code"), Prompt([2], "chat")]
    options = argparse.Namespace(
        temperatures=[0.0, 1.0], max_new_tokens=8, engine_arguments="{}"
    )
    return {
        "long": eval_draft.evaluate(Engine([[1, 1, 2], [1]]), prompts, 3, options),
        "short": eval_draft.evaluate(Engine([[2, 2], [1, 1]]), prompts, 2, options),
    }


def test_drafts_share_one_table(evaluations: dict[str, dict[str, Any]]) -> None:
    lines = eval_draft.comparison(evaluations)
    assert lines[0] == "| draft | domain | T | prompts | accept length | slot 1 | 2 |"
    assert len({line.count("|") for line in lines}) == 1
    assert "| long | code | 0 | 1 | 2.25 | 0.75 | 0.50 |" in lines
    assert "| short | chat | 1 | 1 | 1.50 | 0.50 |  |" in lines
    alone = eval_draft.comparison({"long": evaluations["long"]})
    assert alone == acceptance_table(evaluations["long"])


def test_plot_shows_slots_and_domains_of_every_draft(
    tmp_path: Path, evaluations: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    assert eval_draft.draw(tmp_path / "drafts.png", evaluations)
    left, right = pyplot.gcf().axes
    slots = {line.get_label(): line.get_ydata().tolist() for line in left.lines}
    assert slots["long, T = 0"] == evaluations["long"]["overall"]["0"]["slots"]
    assert len(slots) == 4
    bars = {bars.get_label(): [bar.get_height() for bar in bars] for bars in right.containers}
    lengths = [entry["accept_length"] for entry in evaluations["short"]["domains"][3:]]
    assert bars["short, T = 1"] == pytest.approx(lengths)
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["chat", "code", "all"]
    assert (tmp_path / "drafts.png").read_bytes().startswith(b"\x89PNG")


def test_a_broken_matplotlib_costs_no_numbers(
    tmp_path: Path,
    evaluations: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", object())
    eval_draft.record(tmp_path, evaluations["long"])
    saved = json.loads((tmp_path / "evaluation.json").read_text())
    assert saved["overall"] == evaluations["long"]["overall"] and "plot" not in saved
    assert "no plot: matplotlib cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("drafts", "names"),
    [
        (["a/map"], ["map"]),
        (["a/map", "a/base"], ["map", "base"]),
        (["a/release", "b/release"], ["a-release", "b-release"]),
    ],
    ids=["one", "two", "same-name"],
)
def test_drafts_are_told_apart_by_name(drafts: list[str], names: list[str]) -> None:
    assert eval_draft.draft_names([Path(draft) for draft in drafts]) == names


def test_a_draft_given_twice_is_refused() -> None:
    with pytest.raises(ForkError, match="same folder twice"):
        eval_draft.draft_names([Path("a"), Path("b/../a")])


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
    lines = [json.loads(line) for line in eval_draft.HELD_OUT.read_text().splitlines()]
    count = Counter(line["domain"] for line in lines)
    assert set(count) == {"chat", "code", "math", "copying", "multilingual"}
    # More than a hundred, of which a few may be in the data.
    assert len({line["prompt"] for line in lines}) == len(lines) > 110 and min(count.values()) > 20
