"""Each fault that `make check` names is planted in a scratch checkout and must be reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fork.checkout import Checkout
from fork.faults import check
from small_upstream import pin, upstream_files, write

FIRST, SECOND = "0001-args-add-draft.patch", "0002-args-own-option-7.patch"


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def overlay(name: str, text: str) -> Callable[[Checkout], None]:
    return lambda checkout: write(checkout.overlay / name, text)


def patch(name: str, old: str, new: str) -> Callable[[Checkout], None]:
    return lambda checkout: replace(checkout.patches / name, old, new)


def shrink_budget(checkout: Checkout) -> None:
    pin(checkout, next((checkout.cache / "wheels").iterdir()), budget=2)


def add_file_by_patch(checkout: Checkout) -> None:
    text = (
        "args: new file\n\nWhy: a\nUpstream: b\nDrop-when: c\n\n"
        "diff --git a/sglang/new.py b/sglang/new.py\n"
        "new file mode 100644\n--- /dev/null\n+++ b/sglang/new.py\n@@ -0,0 +1 @@\n+x = 1\n"
    )
    write(checkout.patches / "0003-args-new-file.patch", text)
    replace(checkout.patches / "series", f"{SECOND}\n", f"{SECOND}\n0003-args-new-file.patch\n")


FAULTS: dict[str, tuple[Callable[[Checkout], None], str]] = {
    "removed-line-differs": (
        patch(SECOND, "-OPTION_7 = 'the", "-OPTION_7 = 'a"),
        f"{SECOND} does not apply",
    ),
    "lines-found-elsewhere": (
        patch(SECOND, "@@ -16 +16 @@", "@@ -19 +19 @@"),
        f"{SECOND} does not apply exactly",
    ),
    "patch-file-missing": (
        lambda c: (c.patches / SECOND).unlink(),
        f"series names {SECOND}, which does not exist",
    ),
    "patch-not-in-series": (
        lambda c: replace(c.patches / "series", f"{SECOND}\n", ""),
        f"{SECOND} is not in series",
    ),
    "patch-twice-in-series": (
        lambda c: write(c.patches / "series", f"{FIRST}\n{SECOND}\n{FIRST}\n"),
        f"series names {FIRST} twice",
    ),
    "patch-without-diff": (
        lambda c: write(c.patches / SECOND, "words\n"),
        f"{SECOND} holds no `diff --git` part",
    ),
    "patch-adds-a-file": (
        add_file_by_patch,
        "sglang/new.py, which upstream lacks; use the overlay",
    ),
    "header-line-missing": (
        patch(FIRST, "Drop-when: never\n", ""),
        f"{FIRST}: the header lacks Drop-when",
    ),
    "header-line-empty": (patch(FIRST, "Why: a reason", "Why:"), f"{FIRST}: the header lacks Why"),
    "budget-exceeded": (
        shrink_budget,
        "the patches change 3 upstream lines, 1 more than the budget of 2",
    ),
    "overlay-file-of-upstream": (
        overlay("srt/layers/linear.py", "class Linear: ...\n"),
        "python/sglang/srt/layers/linear.py exists upstream",
    ),
    "overlay-folder-is-upstream-file": (
        overlay("srt/server_args.py/x.py", ""),
        "python/sglang/srt/server_args.py/x.py exists upstream",
    ),
    "import-of-missing-module": (
        overlay("srt/a.py", "\nimport sglang.srt.gone\n"),
        "python/sglang/srt/a.py:2 imports sglang.srt.gone, which",
    ),
    "import-of-missing-name": (
        overlay("srt/a.py", "def f():\n    from sglang.srt.server_args import Gone\n"),
        "python/sglang/srt/a.py:2 imports sglang.srt.server_args.Gone",
    ),
    "relative-import-of-missing-name": (
        overlay("srt/layers/a.py", "from ..server_args import OPTION_77\n"),
        "imports sglang.srt.server_args.OPTION_77",
    ),
    "import-in-a-test": (
        lambda c: write(c.root / "test/test_a.py", "from sglang.srt import gone\n"),
        "test/test_a.py:1 imports sglang.srt.gone",
    ),
    "overlay-is-a-copy": (
        overlay(
            "srt/own_args.py",
            upstream_files()["sglang/srt/server_args.py"] + "EXTRA = 'line of our own'\n",
        ),
        "own_args.py: 97 % of its lines are those of upstream's sglang/srt/server_args.py",
    ),
}


def test_sound_checkout_has_no_fault(patched: Checkout) -> None:
    assert check(patched) == []


@pytest.mark.parametrize(("plant", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_fault_is_reported(patched: Checkout, plant: Callable, words: str) -> None:
    plant(patched)
    faults = check(Checkout(patched.root))
    assert [fault for fault in faults if words in fault], faults
    assert len(faults) == 1, faults


def test_upstream_file_anywhere_in_the_repository_is_reported(patched: Checkout) -> None:
    text = upstream_files()["sglang/srt/server_args.py"]
    write(patched.root / "docs" / "copied.txt", text)
    faults = check(Checkout(patched.root))
    assert faults == [
        "docs/copied.txt is upstream's sglang/srt/server_args.py; "
        "upstream's source is not committed here"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "from sglang.srt.flashmap import noise\n",
        "from sglang.srt.flashmap.noise import ServerArgs\n",
        "import sglang.srt.fast\nfrom sglang.srt.fast import anything\n",
        "try:\n    from sglang.srt.gone import x\nexcept ImportError:\n    x = None\n",
        "from sglang.srt.server_args import *\n",
    ],
    ids=["submodule", "re-exported", "extension-module", "guarded", "star"],
)
def test_import_that_exists_is_no_fault(patched: Checkout, text: str) -> None:
    write(patched.overlay / "srt" / "a.py", text)
    assert check(patched) == []
