"""Moving the series to another release: what applies is carried over, what conflicts is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fork import bump as bump_module
from fork.bump import bump
from fork.checkout import Checkout
from fork.errors import ForkError
from fork.git import Git
from fork.patches import series_names
from fork.tree import build_tree
from small_upstream import make_wheel, upstream_files

ARGS = "sglang/srt/server_args.py"
NEXT = "9.9.0"


@pytest.fixture
def release(patched: Checkout, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes release 9.9.0 known, with edits of server_args.py; returns the scratch folder."""

    def do(*edits: tuple[str, str]) -> Path:
        files = upstream_files(NEXT)
        for old, new in edits:
            assert old in files[ARGS]
            files[ARGS] = files[ARGS].replace(old, new, 1)
        wheel = make_wheel(patched.cache / "bump", files, NEXT)
        monkeypatch.setattr(
            bump_module, "_hashes", lambda *_: {wheel.name: bump_module.sha256(wheel)}
        )
        return patched.build / "bump"

    return do


def test_moved_lines_are_followed_and_written(patched: Checkout, release: Callable) -> None:
    scratch = release(("import os", "import os\nimport sys\nimport re"))
    lines = list(bump(patched, NEXT, scratch))
    assert lines[:2] == ["applies:   args: add draft", "applies:   args: own option 7"]
    assert patched.pin.version == "9.8.7"

    list(bump(patched, NEXT, scratch, write=True))
    moved = Checkout(patched.root)
    assert moved.pin.fork_version == "9.9.0+flashmap.1"
    shutil.copy(next((moved.cache / "bump").iterdir()), moved.cache / "wheels")
    build_tree(moved, moved.build / "new")
    text = (moved.build / "new" / ARGS).read_text()
    assert "import re" in text and "draft = None" in text and "OPTION_7 = 'ours'" in text


def test_conflict_is_named_and_can_be_resolved(patched: Checkout, release: Callable) -> None:
    scratch = release(("    port = 1\n", "    port = 2\n    host = 3\n"))
    lines = []
    with pytest.raises(ForkError, match=f"'args: add draft' conflicts in {ARGS}; resolve it in"):
        for line in bump(patched, NEXT, scratch):
            lines.append(line)
    assert lines == [
        f"conflicts: args: add draft ({ARGS})",
        "applies:   args: own option 7",
    ]
    git = Git(scratch)
    released = git.text("show", f"base:{ARGS}")
    (scratch / ARGS).write_text(released.replace("host = 3", "host = 3\n    draft = None") + "\n")
    git.text("add", ARGS)
    git.text("-c", "core.editor=true", "rebase", "--continue")
    list(bump(patched, NEXT, scratch, write=True))
    assert series_names(patched.patches) == [
        "0001-args-add-draft.patch",
        "0002-args-own-option-7.patch",
    ]


def test_change_that_the_release_has_is_superfluous(patched: Checkout, release: Callable) -> None:
    scratch = release(("OPTION_7 = 'the value of option 7'", "OPTION_7 = 'ours'"))
    lines = list(bump(patched, NEXT, scratch))
    assert lines[1] == "superfluous: args: own option 7 (the release has this change)"
    list(bump(patched, NEXT, scratch, write=True))
    assert series_names(patched.patches) == ["0001-args-add-draft.patch"]


def test_overlay_that_does_not_fit_is_named_and_not_written(
    patched: Checkout, release: Callable
) -> None:
    scratch = release(("class ServerArgs", "class Arguments"))
    lines = []
    with pytest.raises(
        ForkError, match=r"applies to sglang 9\.9\.0, the overlay does not: mend the 1"
    ):
        for line in bump(patched, NEXT, scratch, write=True):
            lines.append(line)
    assert any("noise.py:1 imports sglang.srt.server_args.ServerArgs" in line for line in lines)
    assert Checkout(patched.root).pin.version == "9.8.7"
