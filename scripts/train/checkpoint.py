"""A run's state on disk: one file, replaced atomically.

With the network, its moving average, the optimiser, the step and the curves; random streams and
batches are functions of the step (`draws.py`, `anchors.py`), so nothing else is needed to go on as
if never stopped. A kill while saving leaves the file of the time before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from fork.errors import ForkError

FILE = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    partial = folder / f"{FILE}.partial"
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / FILE)


def load(folder: Path) -> dict[str, Any] | None:
    """The saved state, None when there is none.

    Raises ForkError for a file that is broken.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise ForkError(
            f"the checkpoint {path} is broken ({type(error).__name__}): delete it to start anew."
        ) from None
