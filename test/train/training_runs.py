"""Command lines of the scripts with tiny sizes, and what a run recorded."""

from __future__ import annotations

import json
from pathlib import Path

SIZES = (
    *("--hidden-size", 32, "--heads", 2, "--layers", 1, "--cond-dim", 16, "--block-size", 4),
    *("--batch-size", 8, "--anchors", 12, "--release-dtype", "float32", "--device", "cpu"),
)


def data_command(target: Path, prompts: Path, output: Path, *more: object) -> list[str]:
    words = ["--target", target, "--output", output, "--prompts", prompts]
    words += ["--sampler", "transformers", "--device", "cpu", "--max-new-tokens", 24]
    return [*map(str, words), "--temperatures", "0", "--batch-size", "30", *map(str, more)]


def train_command(target: Path, data: Path, output: Path, *more: object) -> list[str]:
    words = ["--target", target, "--data", data, "--output", output, *SIZES, *more]
    return list(map(str, words))


def curves(run: Path) -> dict[str, list[list[float]]]:
    """Of the last stage of a run's release."""
    return json.loads((run / "release/training.json").read_text())["runs"][-1]["curves"]
