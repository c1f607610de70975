"""The config of a draft to be trained.

Its class is the served one, `python/sglang/srt/configs/flashmap.py`, read by its path: it needs
transformers alone, and a machine that trains may have no sglang.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from fork.errors import ForkError

from train.times import jump_grids

_SOURCE = Path(__file__).resolve().parents[2] / "python/sglang/srt/configs/flashmap.py"
_KEYS = (
    *("target_model", "target_hidden_size", "vocab_size", "target_layer_ids", "block_size"),
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("cond_dim", "time_embed_dim", "time_scale", "rope_theta", "rms_norm_eps"),
    *("qk_norm_eps", "layer_norm_eps", "noise_gate", "time_schedule", "num_steps"),
    *("jump_grids", "draft_vocab_size", "flow_map", "tie_word_embeddings"),
)
_LAYERS_READ = 5


def _load() -> Any:
    name = "flashmap_served_config"
    spec = importlib.util.spec_from_file_location(name, _SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_served = _load()
FlashMapConfig = _served.FlashMapConfig
FlashMapConfigError = _served.FlashMapConfigError


def spread_layers(num_hidden_layers: int) -> list[int]:
    """Target layers a draft reads by default, from the second to the third last.

    Raises ForkError for a target of one layer, of which nothing can be read.
    """
    if num_hidden_layers < 2:
        raise ForkError(
            f"the target has {num_hidden_layers} layer: a draft reads a layer before the last, "
            "so choose a target with at least 2."
        )
    first = min(1, num_hidden_layers - 2)
    last = max(first, num_hidden_layers - 3)
    count = min(_LAYERS_READ, last - first + 1)
    return [round(first + i * (last - first) / max(1, count - 1)) for i in range(count)]


def new_config(
    target_config: Any,
    *,
    name: str,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
    cond_dim: int,
    block_size: int,
    target_layer_ids: list[int] | None = None,
    noise_gate: str = "jump",
) -> FlashMapConfig:
    """A draft's config for the target with the transformers config `target_config`.

    Raises FlashMapConfigError or ForkError for sizes that cannot be.
    """
    text = target_config.get_text_config()
    config = FlashMapConfig(
        target_model=name,
        target_hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        target_layer_ids=target_layer_ids or spread_layers(text.num_hidden_layers),
        block_size=block_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        cond_dim=cond_dim,
        noise_gate=noise_gate,
        jump_grids=jump_grids(text.vocab_size),
    )
    check_target(config, target_config)
    return config


def check_target(config: FlashMapConfig, target_config: Any) -> None:
    """Raises FlashMapConfigError unless `config` fits the target."""
    text = target_config.get_text_config()
    config.validate_for_target(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_hidden_layers=text.num_hidden_layers,
    )


def config_keys(config: FlashMapConfig, dtype: str) -> dict[str, Any]:
    """The content of a release's config.json."""
    return {
        "architectures": ["FlashMapDraftModel"],
        "model_type": config.model_type,
        "torch_dtype": dtype,
        **{key: getattr(config, key) for key in _KEYS},
    }


def read_config(folder: Path) -> FlashMapConfig:
    """The config of a release folder, one of a stage-1 flow too; `flow_map` says which it is.

    Raises ForkError when there is none, FlashMapConfigError when it cannot be.
    """
    try:
        keys = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise ForkError(f"{folder} has no readable config.json: give a draft's folder.") from None
    return from_keys(keys)


def from_keys(keys: dict[str, Any]) -> FlashMapConfig:
    """A config from `config_keys`; a stage-1 flow's too, which the served class refuses."""
    config = FlashMapConfig(**{key: keys[key] for key in _KEYS if key in keys} | {"flow_map": True})
    config.flow_map = bool(keys.get("flow_map", True))
    return config
