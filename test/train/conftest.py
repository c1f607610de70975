"""A target that is easy to draft for, its answers as data, and runs of the real commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import make_data
import pytest
import torch
import train_draft
from tiny_model import write_tiny_model

SIZES = (
    *("--hidden-size", 32, "--heads", 2, "--layers", 1, "--cond-dim", 16, "--block-size", 4),
    *("--batch-size", 8, "--anchors", 12, "--release-dtype", "float32", "--device", "cpu"),
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose next token depends on the last one alone: it soon walks in a circle."""
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(tmp_path_factory.mktemp("train") / "circle-target", seed=3)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"{chr(97 + i % 26)} prompt {i * 7}{chr(65 + i % 23)}\n" for i in range(60)))
    return path


def data_command(target: Path, prompts: Path, output: Path, *more: object) -> list[str]:
    words = ["--target", target, "--output", output, "--prompts", prompts]
    words += ["--sampler", "transformers", "--device", "cpu", "--max-new-tokens", 24]
    return [*map(str, words), "--temperatures", "0", "--batch-size", "30", *map(str, more)]


@pytest.fixture(scope="session")
def data(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data"
    assert make_data.main(data_command(target, prompts, folder)) == 0
    return folder


def train_command(target: Path, data: Path, output: Path, *more: object) -> list[str]:
    words = ["--target", target, "--data", data, "--output", output, *SIZES, *more]
    return list(map(str, words))


@pytest.fixture(scope="session")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """`trained(stage)` is the run folder of a stage, trained on first use."""
    root = tmp_path_factory.mktemp("runs")

    def run(stage: str) -> Path:
        folder = root / stage
        if not folder.exists():
            more: list[object] = ["--stage", stage, "--steps", 160, "--ema", 0.9, "--lr", 0.01]
            more += ["--validate-every", 20]
            if stage == "map":
                more += ["--init", run("flow") / "release"]
            assert train_draft.main(train_command(target, data, folder, *more)) == 0
        return folder

    return run


def curves(run: Path) -> dict[str, list[list[float]]]:
    """Of the last stage of a run's release."""
    return json.loads((run / "release/training.json").read_text())["runs"][-1]["curves"]
