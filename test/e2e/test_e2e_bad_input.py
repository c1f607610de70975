"""A server that cannot run FLASHMAP as asked ends at once, and its last line says what to do.

The sentences are tested one by one where they are made (test/flashmap); here a few of them go the
whole way, through a server's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import pytest
from drafts.folders import write_draft
from e2e_cases import flashmap_server
from safetensors.torch import load_file, save_file
from serving import ServerFailed
from tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    from make_draft import main as make_draft

    folder = target.with_name("draft")
    assert not make_draft(["--target", str(target), "--output", str(folder)])
    return folder


@dataclass(frozen=True)
class Start:
    """What to serve, and what the last line has to say about it."""

    draft: Path
    sentence: str
    arguments: tuple[str, ...] = ()


def missing_folder(folder: Path, draft: Path) -> Start:
    return Start(folder, f"{folder} does not exist; pass a FlashMap release folder or a Hugging")


def renamed_tensor(folder: Path, draft: Path) -> Start:
    write_draft(folder, draft, "FlashMapDraftModel")
    weights = load_file(folder / "model.safetensors")
    weights["hidden_norm.scale"] = weights.pop("hidden_norm.weight")
    save_file(weights, folder / "model.safetensors")
    return Start(folder, "lacks hidden_norm.weight and has the unexpected hidden_norm.scale; use a")


def other_backend(folder: Path, draft: Path) -> Start:
    sentence = "FLASHMAP cannot verify with --attention-backend triton on cpu; choose torch_native."
    return Start(draft, sentence, ("--attention-backend", "triton"))


@pytest.mark.parametrize("fault", [missing_folder, renamed_tensor, other_backend])
def test_a_start_ends_in_one_sentence(
    fault: Callable[[Path, Path], Start], target: Path, draft: Path, tmp_path: Path
) -> None:
    start = fault(tmp_path / "draft", draft)
    log = log_of_failed_start(target, start)
    assert start.sentence in log.splitlines()[-1]
    assert "Load weight begin" not in log and "Traceback" not in log


def log_of_failed_start(target: Path, start: Start) -> str:
    server = flashmap_server(target, start.draft, *start.arguments)
    with pytest.raises(ServerFailed):
        server.start()
    return server.log()


def test_a_weight_that_is_not_finite_ends_the_start_in_one_sentence(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    """Which only the scheduler's process sees, since it alone reads weights."""
    folder = write_draft(tmp_path / "draft", draft, "FlashMapDraftModel")
    weights = load_file(folder / "model.safetensors")
    weights["head.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    log = log_of_failed_start(target, Start(folder, ""))
    assert log.splitlines()[-1].startswith("error: The FlashMap draft checkpoint: tensor head.wei")
    assert "Traceback" not in log


def test_a_target_that_hides_its_states_ends_the_start_in_one_sentence(tmp_path: Path) -> None:
    from make_draft import main as make_draft

    target, folder = write_tiny_model(tmp_path / "target", "gemma2"), tmp_path / "draft"
    assert not make_draft(["--target", str(target), "--output", str(folder)])
    log = log_of_failed_start(target, Start(folder, ""))
    sentence = "error: FLASHMAP cannot read hidden states of a Gemma2ForCausalLM target; serve it"
    assert log.splitlines()[-1].startswith(sentence) and "Traceback" not in log
