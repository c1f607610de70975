"""Writes the draft folders of this package from an untrained draft folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Sequence

from drafts.replay import Corruption, Reference

PACKAGE = "drafts"


def whole_block(draft: Path, args: Sequence[object]) -> tuple[object, ...]:
    """Flags that make a CPU server verify all drafts of a block; none where `args` name a width."""
    named = {"--speculative-num-draft-tokens", "--speculative-flashmap-verify-width"}
    path = draft / "config.json"
    if named & set(args) or not path.exists():
        return ()
    return "--speculative-num-draft-tokens", json.loads(path.read_text()).get("block_size", 16) + 1


def write_draft(folder: Path, base: Path, architecture: str, **settings: Any) -> Path:
    """Copy the draft `base` to `folder` with another architecture and more config keys."""
    shutil.copytree(base, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": [architecture], **settings}
    path.write_text(json.dumps(config))
    return folder


def write_oracle(
    folder: Path,
    base: Path,
    references: Sequence[Reference],
    corruption: Corruption,
    *,
    architecture: str = "OracleDraftModel",
    doubt: float | None = None,
    **settings: Any,
) -> Path:
    """Write the draft folder of an `OracleDraftModel` or `RecordingDraftModel`."""
    path = folder / "references.json"
    oracle = dict(
        references=str(path),
        probabilities=corruption.probabilities,
        seed=corruption.seed,
        doubt=doubt,
    )
    write_draft(folder, base, architecture, oracle=oracle, **settings)
    path.write_text(
        json.dumps([{"prompt": r.prompt, "completion": r.completion} for r in references])
    )
    return folder
