"""A release folder: what FLASHMAP serves and the flashmap package loads.

    config.json                 flow_map false for stage 1, which no server takes
    model.safetensors           the moving average of the weights
    draft_vocab.safetensors     ids, all tokens, most frequent in the answers first; counts
    training.json, curves.png, README.md    how it was made (card.py)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fork.errors import ForkError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from train.card import write_card
from train.draft_config import FlashMapConfig, config_keys, read_config
from train.network import DraftNetwork

VOCAB_FILE = "draft_vocab.safetensors"


def draft_vocabulary(counts: np.ndarray) -> dict[str, torch.Tensor]:
    """`ids (V,)` by falling count, the lower id first among equals, and their `counts`."""
    ids = np.argsort(-counts, kind="stable")
    return {"ids": torch.from_numpy(ids), "counts": torch.from_numpy(counts[ids])}


def write_release(
    folder: Path,
    network: DraftNetwork,
    *,
    flow_map: bool,
    counts: np.ndarray,
    record: dict[str, Any],
    dtype: str,
) -> None:
    """Writes `folder`, replacing one that is there whole; `record` is training.json."""
    config = network.config
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        keys = config_keys(config, dtype) | {"flow_map": flow_map}
        (made / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
        weights = {
            name: value.detach().to("cpu", getattr(torch, dtype)).contiguous()
            for name, value in network.state_dict().items()
        }
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        save_file(draft_vocabulary(counts), made / VOCAB_FILE)
        (made / "training.json").write_text(json.dumps(record, indent=1) + "\n")
        write_card(made)
        for path in made.iterdir():
            path.chmod(0o644)
        if folder.exists():
            folder.replace(Path(scratch) / "old")
        made.replace(folder)


def read_release(folder: Path) -> tuple[FlashMapConfig, dict[str, torch.Tensor]]:
    """Config and float32 weights of a release, a stage-1 flow's too.

    Raises ForkError when they cannot be read or are not of one draft.
    """
    config = read_config(folder)
    try:
        weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ForkError(f"{folder}/model.safetensors cannot be read ({error}).") from None
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in DraftNetwork(config).named_parameters()}
    if {name: tuple(weight.shape) for name, weight in weights.items()} != expected:
        raise ForkError(f"the weights in {folder} do not match its config.json: fetch it again.")
    return config, {name: weight.float() for name, weight in weights.items()}
