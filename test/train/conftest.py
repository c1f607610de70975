"""A target that is easy to draft for, its answers as data, and runs of the real commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import make_data
import pytest
import torch
import train_draft
from tiny_model import write_tiny_model
from training_runs import data_command, train_command


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
    lines = (f"{chr(97 + i % 26)} prompt {i * 7}{chr(65 + i % 23)}\n" for i in range(60))
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="session")
def data(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data"
    assert make_data.main(data_command(target, prompts, folder)) == 0
    return folder


@pytest.fixture(scope="session")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """`trained(stage)` is the run folder of a stage, trained on first use."""
    root = tmp_path_factory.mktemp("runs")

    def run(stage: str) -> Path:
        folder = root / stage
        if not folder.exists():
            more: list[object] = ["--stage", stage, "--steps", 120, "--ema", 0.9, "--lr", 0.01]
            more += ["--validate-every", 20]
            if stage == "map":
                more += ["--init", run("flow") / "release"]
            assert train_draft.main(train_command(target, data, folder, *more)) == 0
        return folder

    return run
