"""Measuring one after another: engines start side by side, because starting takes longest."""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone() -> Iterator[None]:
    """Waits for the other measurements on a machine to end, and holds those off that come after."""
    with (Path(tempfile.gettempdir()) / "flashmap-benchmark.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def await_turn(turn: Path) -> None:
    """In a process that ``give_turns`` watches: says that it has started, and waits."""
    _ready(turn).touch()
    while not turn.exists():
        time.sleep(0.2)


def start(command: Sequence[str], turn: Path, log: Path) -> subprocess.Popen:
    """Starts a process that will call ``await_turn(turn)``."""
    for stale in (turn, _ready(turn)):
        stale.unlink(missing_ok=True)
    with log.open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def give_turns(started: Sequence[tuple[Path, subprocess.Popen]]) -> list[subprocess.Popen]:
    """Once all have started or died, lets them measure one after another; those that failed."""
    for turn, process in started:
        while not _ready(turn).exists() and process.poll() is None:
            time.sleep(0.5)
    failed = []
    for turn, process in started:
        turn.touch()
        if process.wait():
            failed.append(process)
    return failed


def _ready(turn: Path) -> Path:
    return turn.with_suffix(".ready")
