"""Where the fork's parts lie in a checkout, and what `python/upstream.toml` pins."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import ForkError


@dataclass(frozen=True)
class Pin:
    """The pinned upstream release.

    Attributes:
        version: upstream's version, e.g. `0.5.23`.
        local: the fork's own counter, e.g. `flashmap.1`.
        budget: most upstream lines (added + removed) that the patches may change.
        wheels: sha256 in hex by wheel file name.
    """

    version: str
    local: str
    budget: int
    wheels: dict[str, str]

    @property
    def fork_version(self) -> str:
        return f"{self.version}+{self.local}"


@dataclass(frozen=True)
class Checkout:
    """A checkout of this repository; `root` is its top folder."""

    root: Path

    @property
    def overlay(self) -> Path:
        return self.root / "python" / "sglang"

    @property
    def patches(self) -> Path:
        return self.root / "python" / "patches"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def pin_file(self) -> Path:
        return self.root / "python" / "upstream.toml"

    @property
    def cache(self) -> Path:
        """For downloads: `$XDG_CACHE_HOME/sglang-flashmap`, else `.cache` of the checkout."""
        xdg = os.environ.get("XDG_CACHE_HOME")
        return Path(xdg) / "sglang-flashmap" if xdg else self.root / ".cache"

    @cached_property
    def pin(self) -> Pin:
        """Raises ForkError when `python/upstream.toml` is missing or lacks a key."""
        try:
            data = tomllib.loads(self.pin_file.read_text())
            return Pin(data["version"], data["local"], int(data["budget"]), dict(data["wheels"]))
        except FileNotFoundError:
            raise ForkError(
                f"{self.pin_file} is missing; restore it with `git checkout`."
            ) from None
        except (KeyError, tomllib.TOMLDecodeError) as error:
            raise ForkError(f"{self.pin_file} is not complete ({error}); restore it.") from None


def here() -> Checkout:
    """The checkout this file belongs to."""
    return Checkout(Path(__file__).resolve().parents[2])
