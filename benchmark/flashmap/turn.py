"""One measurement at a time on a machine, whichever scripts run there."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone() -> Iterator[None]:
    """Waits for the other measurements to end, and holds those off that come after."""
    with (Path(tempfile.gettempdir()) / "flashmap-benchmark.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
