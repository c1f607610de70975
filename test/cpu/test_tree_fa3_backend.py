"""fa3's tables of a tree, in one launch: bit for bit those that upstream makes in dozens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = ("page1", "page1-padded", "page16-padded", "page1-eager", "page16-eager")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    results = tmp_path_factory.mktemp("suffix") / "results.pt"
    script = Path(__file__).with_name("interpreted_tree_suffix.py")
    run = subprocess.run([sys.executable, script, results], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return torch.load(results)


@pytest.mark.parametrize("name", CASES)
def test_tables_are_upstreams(name: str, compared: dict[str, dict]) -> None:
    assert all(compared[name]["equal"])


def test_a_replay_takes_two_launches(compared: dict[str, dict]) -> None:
    assert compared["page1"]["after"] == 2 < compared["page1"]["before"]
