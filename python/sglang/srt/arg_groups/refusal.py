"""``StartRefused``: a start that is refused in one sentence, without a traceback.

Arguments are refused in the launching process. What only weights or the target's class show is
refused in the scheduler's process, which sends the sentence to the launching one instead of saying
that it is ready.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator


class StartRefused(ValueError):
    """What is wrong with what is to be served and the way out; where it was found helps nobody."""


@contextmanager
def refusals_said_alone() -> Iterator[None]:
    """Let a process whose start is refused within end with the sentence, and status 1."""
    try:
        yield
    except StartRefused as refusal:
        raise SystemExit(f"error: {refusal}") from None


def send_refusal(pipe: Any, refusal: StartRefused) -> None:
    """Tell the process that waits at the other end of ``pipe`` for a scheduler to be ready."""
    pipe.send({"status": "refused", "refusal": str(refusal)})


def raise_refusal(message: dict[str, Any]) -> None:
    """Raise what ``send_refusal`` sent, if ``message`` of a scheduler is that."""
    if message["status"] == "refused":
        raise StartRefused(message["refusal"])
