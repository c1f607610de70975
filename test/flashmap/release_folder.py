"""A tiny target and a FlashMap release folder that fits it, as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from draft_pair import draft_sizes, random_weights
from safetensors.torch import load_file, save_file
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.models.flashmap import FlashMapDraftModel

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
WEIGHTS, VOCAB_FILE = "model.safetensors", "draft_vocab.safetensors"


def write_target(folder: Path, **changes: Any) -> Path:
    """A target's config.json, which is all that argument handling reads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
    return folder


def release_keys(**changes: Any) -> dict[str, Any]:
    """The config.json of a release for `TARGET`; a change to ... drops the key."""
    sizes = draft_sizes(
        head_dim=8, target_hidden_size=TARGET["hidden_size"], vocab_size=TARGET["vocab_size"]
    )
    released = {
        "architectures": ["FlashMapDraftModel"],
        "model_type": "flashmap",
        "flow_map": True,
        "noise_gate": "jump",
        "num_steps": 1,
        "jump_grids": {"1": [0.0, 1.0], "3": [0.0, 0.5, 0.75, 1.0]},
        # What the plugin's parser wanted; read by nobody here.
        "markov_rank": 1,
        "mask_token_id": 0,
    }
    merged = sizes | released | changes
    return {key: value for key, value in merged.items() if value is not ...}


def write_release(folder: Path, **changes: Any) -> Path:
    """A complete release with a draft vocabulary; `changes` reach its config.json alone."""
    folder.mkdir()
    config = FlashMapConfig(**release_keys())
    save_file(random_weights(FlashMapDraftModel(config)), folder / WEIGHTS)
    ids = torch.randperm(config.vocab_size)
    save_file({"ids": ids, "counts": torch.arange(config.vocab_size).flip(0)}, folder / VOCAB_FILE)
    (folder / "config.json").write_text(json.dumps(release_keys(**changes)))
    return folder


def edit(path: Path, change: Callable[[dict], Any]) -> None:
    """Rewrites a safetensors file after `change` has altered its dict of tensors in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
