"""No draft folder crashes a start or runs code, whatever is in it; the soak tries many more."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fuzz_folders import PLANTED, RANKING, WEIGHTS, draft_base, verdict, write_fuzzed
from safetensors.torch import load_file, save_file
from soak_servers import Models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def base(models: Models) -> Path:
    return draft_base(models.untrained, models.folder / "base")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resolution sets variables for the processes it would start; no test may use a network."""
    before = dict(os.environ)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_an_intact_folder_loads(models: Models, base: Path) -> None:
    assert verdict(models.target, base) == ""


@pytest.mark.parametrize("seeds", [range(0, 20), range(20, 40)], ids=["first", "second"])
def test_damaged_folders_load_or_are_refused(
    models: Models, base: Path, tmp_path: Path, seeds: range
) -> None:
    refused = 0
    for seed in seeds:
        draft = tmp_path / f"draft-{seed}"
        damage = write_fuzzed(draft, base, seed)
        flags = ("--trust-remote-code",) if seed % 2 else ()  # the target's code is trusted
        message = verdict(models.target, draft, *flags)
        assert "\n" not in message, (damage, seed)
        assert not (tmp_path / PLANTED).exists(), (damage, seed)
        refused += bool(message)
    assert len(seeds) // 2 < refused < len(seeds)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_named(
    models: Models, base: Path, tmp_path: Path, number: str
) -> None:
    draft = shutil.copytree(base, tmp_path / "draft")
    tensors = load_file(draft / WEIGHTS)
    tensors["head.bias"][3] = float(number)
    save_file(tensors, draft / WEIGHTS)
    assert "tensor head.bias holds NaN or infinity" in verdict(models.target, draft)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_weights_are_named(
    models: Models, base: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    draft = shutil.copytree(base, tmp_path / "draft")
    tensors = load_file(draft / WEIGHTS)
    tensors["fc.weight"] = tensors["fc.weight"].to(dtype)
    save_file(tensors, draft / WEIGHTS)
    message = verdict(models.target, draft)
    assert "tensor fc.weight is of dtype" in message and str(draft) in message


def test_a_ranking_of_no_integers_is_refused(models: Models, base: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(base, tmp_path / "draft")
    save_file({"ids": load_file(draft / RANKING)["ids"].float()}, draft / RANKING)
    assert "ids has dtype F32, but token ids are integers" in verdict(models.target, draft)


def test_hostile_names_stay_on_one_line(models: Models, base: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(base, tmp_path / "draft")
    tensors = load_file(draft / WEIGHTS) | {"a\n\x1b[2J" + "b" * 5000: torch.ones(1)}
    save_file(tensors, draft / WEIGHTS)
    message = verdict(models.target, draft)
    assert "unexpected 'a\\n\\x1b[2Jb" in message and len(message) < 500


@pytest.mark.parametrize("names, served", [(None, True), ([], False), ("é", False), ([7], False)])
def test_the_model_class_may_be_left_out(
    models: Models, base: Path, tmp_path: Path, names: object, served: bool
) -> None:
    draft = shutil.copytree(base, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"architectures": names}))
    message = verdict(models.target, draft)
    assert not message if served else "architectures must be a list" in message


@pytest.mark.parametrize("value", [0.5, {"hidden_size": 4}, None], ids=repr)
def test_a_nested_config_is_refused(
    models: Models, base: Path, tmp_path: Path, value: object
) -> None:
    draft = shutil.copytree(base, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"text_config": value}))
    assert "text_config belongs to models of several parts" in verdict(models.target, draft)


def test_a_config_cannot_choose_other_code(models: Models, base: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(base, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoConfig": "custom.Custom"}})
    )
    (draft / "custom.py").write_text(f"import os; os.mkdir({str(tmp_path / PLANTED)!r})")
    assert verdict(models.target, draft, "--trust-remote-code") == ""
    assert not (tmp_path / PLANTED).exists()
