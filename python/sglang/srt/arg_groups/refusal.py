"""``StartRefused``: server arguments that are refused in one sentence, without a traceback."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator


class StartRefused(ValueError):
    """What is wrong with the arguments and the way out; where it was found helps nobody."""


@contextmanager
def refusals_said_alone() -> Iterator[None]:
    """Let a process whose arguments are refused within end with the sentence, and status 1."""
    try:
        yield
    except StartRefused as refusal:
        raise SystemExit(f"error: {refusal}") from None
