"""Fetching the pinned wheel: only the known bytes, and one clear sentence otherwise."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from fork.checkout import Checkout
from fork.errors import ForkError
from fork.upstream_wheel import fetch


def test_cached_wheel_needs_no_network(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch(checkout).parent == checkout.root / ".cache" / "wheels"


def test_cache_is_xdg_when_set(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkout.cache == tmp_path / "sglang-flashmap"


def test_changed_wheel_is_refused(checkout: Checkout) -> None:
    path = fetch(checkout)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(
        ForkError, match=f"{path.name} has sha256 .*, not .* as upstream.toml says; delete it"
    ):
        fetch(checkout)


def test_without_an_index_the_sentence_names_the_network(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(checkout).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    words = (
        rf"sglang 9\.8\.7 could not .* check the network, or put .* {checkout.cache}/wheels your"
    )
    with pytest.raises(ForkError, match=words):
        fetch(checkout)
    assert list((checkout.cache / "wheels").iterdir()) == []


def test_machine_without_a_wheel_is_named(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        ForkError, match=r"no pinned wheel for cp3\d+ on riscv64 .*; use Linux on x86_64"
    ):
        fetch(checkout)


@pytest.mark.parametrize(
    ("text", "words"),
    [("version = ", "is not complete"), ('version = "1"', "is not complete"), (None, "is missing")],
    ids=["no-toml", "keys-missing", "absent"],
)
def test_pin_that_cannot_be_read_is_named(checkout: Checkout, text: str | None, words: str) -> None:
    if text is None:
        checkout.pin_file.unlink()
    else:
        checkout.pin_file.write_text(text)
    with pytest.raises(ForkError, match=f"upstream.toml {words}"):
        fetch(Checkout(checkout.root))
