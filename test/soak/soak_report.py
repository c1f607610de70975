"""The soak's table: one line a phase, and whether all of it is as it should be."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

COLUMNS = ("requests", "aborted", "refused", "lost", "wrong", "leaked", "errors")


@dataclass
class Phase:
    """Counts of one phase; safe to count from several threads.

    `aborted`: ended early on purpose. `refused`: answered with a status from 400 to 499.
    `lost`: no answer, or one with a status from 500 on. `wrong`: not the answer expected.
    `leaked`: things that an idle server still held. `errors`: tracebacks in its log.
    """

    name: str
    requests: int = 0
    aborted: int = 0
    refused: int = 0
    lost: int = 0
    wrong: int = 0
    leaked: int = 0
    errors: int = 0
    seconds: float = 0.0
    growth: int = 0
    """Bytes by which the server's resident memory grew."""
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, column: str, note: str = "") -> None:
        with self._lock:
            setattr(self, column, getattr(self, column) + 1)
            if note and len(self.notes) < 20:
                self.notes.append(f"{column}: {note}")

    @property
    def faults(self) -> int:
        return self.lost + self.wrong + self.leaked + self.errors


def table(phases: list[Phase]) -> str:
    """The phases and their sum as a Markdown table."""
    head = ("phase", *COLUMNS, "seconds", "memory growth, MB")
    rows = [
        (p.name, *(getattr(p, c) for c in COLUMNS), round(p.seconds, 1), round(p.growth / 1e6, 1))
        for p in phases
    ]
    sums = [sum(row[i] for row in rows) for i in range(1, len(COLUMNS) + 2)]
    rows.append(("sum", *sums[:-1], round(sums[-1], 1), ""))
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
