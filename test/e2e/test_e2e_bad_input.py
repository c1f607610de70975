"""A server that cannot run FLASHMAP as asked ends at once, and its last line says what to do.

The sentences are tested one by one where they are made (test/flashmap); here a few of them go the
whole way, through a server's start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_cases import flashmap_server
from safetensors.torch import load_file, save_file
from serving import ServerFailed
from tiny_model import write_tiny_model

from drafts.folders import write_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    from make_draft import main as make_draft

    folder = target.with_name("draft")
    assert not make_draft(["--target", str(target), "--output", str(folder)])
    return folder


def missing_folder(folder: Path, draft: Path) -> tuple[Path, tuple[str, ...], str]:
    return folder, (), "does not exist; pass a FlashMap release folder or"


def renamed_tensor(folder: Path, draft: Path) -> tuple[Path, tuple[str, ...], str]:
    write_draft(folder, draft, "FlashMapDraftModel")
    weights = load_file(folder / "model.safetensors")
    weights["hidden_norm.scale"] = weights.pop("hidden_norm.weight")
    save_file(weights, folder / "model.safetensors")
    return folder, (), (
        "lacks hidden_norm.weight and has the unexpected hidden_norm.scale; use a complete FlashMap "
        "release whose weights match its config.json."
    )


def unknown_backend(folder: Path, draft: Path) -> tuple[Path, tuple[str, ...], str]:
    arguments = ("--attention-backend", "triton")
    return draft, arguments, "cannot verify with --attention-backend triton on cpu; choose torch_nat"


@pytest.mark.parametrize("fault", [missing_folder, renamed_tensor, unknown_backend])
def test_a_start_ends_in_one_sentence(fault, target: Path, draft: Path, tmp_path: Path) -> None:
    folder, arguments, sentence = fault(tmp_path / "draft", draft)
    server = flashmap_server(target, folder, *arguments)
    with pytest.raises(ServerFailed):
        server.start()
    log = server.log()
    assert sentence in log.splitlines()[-1]
    assert "Load weight begin" not in log
