"""Scratch checkouts of the fork over the small upstream of `small_upstream`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fork.checkout import Checkout, here
from fork.git import Git
from fork.tree import build_tree, refresh
from small_upstream import HEADER, make_wheel, pin, upstream_files, write


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A checkout with the small upstream, an empty series, an overlay folder and file."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    root = tmp_path / "checkout"
    made = Checkout(root)
    for name in ("LICENSE", "NOTICE", ".gitignore"):
        root.mkdir(exist_ok=True)
        shutil.copy(here().root / name, root / name)
    write(root / "python/pyproject.toml", (here().root / "python/pyproject.toml").read_text())
    text = (root / "python/pyproject.toml").read_text().split("[tool.fork]")[0]
    write(
        root / "python/pyproject.toml",
        text + '[tool.fork]\nbase = ["torch", "dill>=1"]\ntest = ["pytest"]\ntrain = ["plots"]\n',
    )
    write(root / "python/patches/series", "")
    write(
        root / "python/sglang/srt/flashmap/noise.py",
        "from sglang.srt.server_args import ServerArgs\n",
    )
    write(root / "python/sglang/srt/layers/drafter.py", "from .linear import Linear\n")
    pin(made, make_wheel(made.cache / "wheels", upstream_files()))
    Git(root).text("init", "-q")
    return Checkout(root)


@pytest.fixture
def tree(checkout: Checkout) -> Path:
    """The built tree of `checkout`."""
    build_tree(checkout, checkout.build / "tree")
    return checkout.build / "tree"


@pytest.fixture
def commit(checkout: Checkout) -> Callable[..., None]:
    """Commits an edit in a tree: `commit(tree, "sglang/srt/server_args.py", old, new, subject)`."""

    def do(tree: Path, name: str, old: str, new: str, subject: str, body: str = HEADER) -> None:
        text = (tree / name).read_text()
        assert old in text
        (tree / name).write_text(text.replace(old, new, 1))
        Git(tree).text("commit", "-q", "-a", "-m", f"{subject}\n\n{body}")

    return do


@pytest.fixture
def patched(checkout: Checkout, tree: Path, commit: Callable[..., None]) -> Checkout:
    """`checkout` with two patches in its series; both change the same file."""
    name = "sglang/srt/server_args.py"
    commit(tree, name, "    port = 1", "    port = 1\n    draft = None", "args: add draft")
    commit(
        tree, name, "OPTION_7 = 'the value of option 7'", "OPTION_7 = 'ours'", "args: own option 7"
    )
    refresh(checkout, tree)
    return checkout
