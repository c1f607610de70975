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


def await_turn(turn: Path, number: int = 0) -> None:
    """In a process that ``give_turns`` watches: says that it has started, and waits for its turn
    ``number``. ``end_turn`` or the process's end ends it."""
    _file(turn, "ready").touch()
    while not _file(turn, f"{number}.given").exists():
        time.sleep(0.2)


def end_turn(turn: Path, number: int) -> None:
    _file(turn, f"{number}.ended").touch()


def start(command: Sequence[str], turn: Path, log: Path) -> subprocess.Popen:
    """Starts a process that will call ``await_turn(turn)``."""
    for stale in turn.parent.glob(f"{turn.name}.*"):
        stale.unlink()
    with log.open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def give_turns(
    started: Sequence[tuple[Path, subprocess.Popen]], turns: int = 1
) -> list[subprocess.Popen]:
    """Once all have started or died, lets them measure one after another, ``turns`` times; those
    that failed."""
    for turn, process in started:
        while not _file(turn, "ready").exists() and process.poll() is None:
            time.sleep(0.5)
    for number in range(turns):
        for turn, process in started:
            _file(turn, f"{number}.given").touch()
            while not _file(turn, f"{number}.ended").exists() and process.poll() is None:
                time.sleep(0.2)
    return [process for _, process in started if process.wait()]


def _file(turn: Path, suffix: str) -> Path:
    return turn.with_name(f"{turn.name}.{suffix}")
