"""The built tree: reproducible, live, and never at the cost of work that is not saved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fork.checkout import Checkout
from fork.errors import ForkError
from fork.git import Git
from fork.patches import series_names
from fork.tree import build_tree, refresh
from small_upstream import HEADER

ARGS = "sglang/srt/server_args.py"


def head(tree: Path) -> str:
    return Git(tree).text("rev-parse", "HEAD")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tree_twice_gives_the_same_commits(patched: Checkout) -> None:
    for name in ("one", "two"):
        build_tree(patched, patched.build / name)
    assert head(patched.build / "one") == head(patched.build / "two")
    assert "draft = None" in (patched.build / "one" / ARGS).read_text()
    assert Git(patched.build / "one").text("status", "--porcelain") == ""


def test_unchanged_tree_is_left_alone(checkout: Checkout, tree: Path) -> None:
    before = (tree / ARGS).stat().st_mtime_ns
    assert build_tree(checkout, tree).endswith("is up to date")
    assert (tree / ARGS).stat().st_mtime_ns == before


def test_python_in_the_tree_reports_the_fork_version(checkout: Checkout, tree: Path) -> None:
    code = "import sglang, importlib.metadata as m; print(sglang.__version__, m.version('sglang'))"
    output = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert output.stdout.split() == ["9.8.7+flashmap.1"] * 2, output.stderr


def test_overlay_edit_is_live_and_new_and_removed_files_follow(
    checkout: Checkout, tree: Path
) -> None:
    assert (tree / "sglang/srt/flashmap").is_symlink()
    assert (tree / "sglang/srt/layers/drafter.py").is_symlink()
    (checkout.overlay / "srt/flashmap/noise.py").write_text("changed = 1\n")
    assert (tree / "sglang/srt/flashmap/noise.py").read_text() == "changed = 1\n"

    (checkout.overlay / "srt/layers/drafter.py").rename(checkout.overlay / "srt/layers/planner.py")
    build_tree(checkout, tree)
    assert not os.path.lexists(tree / "sglang/srt/layers/drafter.py")
    assert (tree / "sglang/srt/layers/planner.py").read_text() == "from .linear import Linear\n"
    assert Git(tree).text("status", "--porcelain") == ""


def test_overlay_path_of_upstream_is_refused(checkout: Checkout) -> None:
    (checkout.overlay / "srt/layers/linear.py").write_text("mine = 1\n")
    with pytest.raises(ForkError, match="python/sglang/srt/layers/linear.py exists upstream"):
        build_tree(checkout, checkout.build / "tree")


def test_refresh_then_tree_gives_the_same_files(patched: Checkout, tree: Path) -> None:
    build_tree(patched, patched.build / "again")
    assert Git(patched.build / "again").text("rev-parse", "HEAD^{tree}") == Git(tree).text(
        "rev-parse", "HEAD^{tree}"
    )


def test_refresh_has_stable_bytes(patched: Checkout) -> None:
    before = bytes_of(patched.patches)
    build_tree(patched, patched.build / "again")
    assert refresh(patched, patched.build / "again", force=True) == []
    assert bytes_of(patched.patches) == before
    text = before["0001-args-add-draft.patch"].decode()
    assert text.startswith(f"args: add draft\n\n{HEADER}\n\ndiff --git a/{ARGS}")
    assert "\nindex " not in text and "2000-01-01" not in text


def test_patch_keeps_its_number_while_the_order_allows(
    patched: Checkout, tree: Path, commit: Callable[..., None]
) -> None:
    old, new = (
        patched.patches / name
        for name in ("0002-args-own-option-7.patch", "0010-args-own-option-7.patch")
    )
    old.rename(new)
    (patched.patches / "series").write_text(
        "0001-args-add-draft.patch\n0010-args-own-option-7.patch\n"
    )
    build_tree(patched, tree)
    commit(tree, ARGS, "OPTION_9", "OPTION_NINE", "args: spell nine")
    refresh(patched, tree)
    assert [name[:4] for name in series_names(patched.patches)] == ["0001", "0010", "0011"]


@pytest.mark.parametrize("saved", ["edit", "commit"])
def test_tree_keeps_unsaved_work_unless_forced(
    patched: Checkout, tree: Path, commit: Callable[..., None], saved: str
) -> None:
    if saved == "edit":
        (tree / ARGS).write_text("unsaved = 1\n")
    else:
        commit(tree, ARGS, "OPTION_3", "OPTION_THREE", "args: spell three")
    patch = patched.patches / "0001-args-add-draft.patch"
    patch.write_bytes(patch.read_bytes().replace(b"draft = None", b"draft = 5"))
    with pytest.raises(ForkError, match="not committed" if saved == "edit" else "--rebase"):
        build_tree(patched, tree)
    build_tree(patched, tree, force=True)
    assert (
        "OPTION_THREE" not in (tree / ARGS).read_text() and "draft = 5" in (tree / ARGS).read_text()
    )


def test_rebase_carries_commits_over_to_the_changed_series(
    patched: Checkout, tree: Path, commit: Callable[..., None]
) -> None:
    other = patched.build / "other"
    build_tree(patched, other)
    commit(tree, ARGS, "OPTION_3", "OPTION_THREE", "args: spell three")
    commit(other, ARGS, "OPTION_20", "OPTION_TWENTY", "args: spell twenty")
    refresh(patched, other)
    with pytest.raises(ForkError, match="--rebase"):
        refresh(patched, tree)
    build_tree(patched, tree, rebase=True)
    refresh(patched, tree)
    assert len(series_names(patched.patches)) == 4
    text = (tree / ARGS).read_text()
    assert "OPTION_THREE" in text and "OPTION_TWENTY" in text


def test_conflict_of_own_commits_is_named_and_force_gets_out(
    patched: Checkout, tree: Path, commit: Callable[..., None]
) -> None:
    commit(tree, ARGS, "OPTION_3 ", "OPTION_THREE ", "args: spell three")
    patch = patched.patches / "0001-args-add-draft.patch"
    added = b"@@ -11 +12 @@ OPTION_2 = 'x'\n-OPTION_3 = 'the value of option 3'\n+OPTION_3 = 3\n"
    patch.write_bytes(patch.read_bytes() + added)
    with pytest.raises(ForkError, match=f"conflict with the changed series in {ARGS}; resolve"):
        build_tree(patched, tree, rebase=True)
    (tree / "sglang" / "scribble.py").touch()
    build_tree(patched, tree, force=True)
    git = Git(tree)
    assert (
        git.text("status", "--porcelain") == "" and git.text("branch", "--show-current") == "fork"
    )
    assert "OPTION_3 = 3" in (tree / ARGS).read_text()
    assert (tree / "sglang/srt/flashmap/noise.py").exists()


def test_refresh_refuses_a_message_without_header(
    checkout: Checkout, tree: Path, commit: Callable[..., None]
) -> None:
    commit(tree, ARGS, "OPTION_3", "OPTION_THREE", "args: spell three", body="Why: so")
    with pytest.raises(ForkError, match="'args: spell three' lacks Upstream, Drop-when"):
        refresh(checkout, tree)


def test_folder_that_is_no_tree_is_not_touched(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("x")
    with pytest.raises(ForkError, match="was not made by `make tree`"):
        build_tree(checkout, tmp_path / "mine")
