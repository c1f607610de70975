"""Model folders of Qwen3-8B shapes for benchmarks with random weights (load format dummy)."""

from __future__ import annotations

import json
from pathlib import Path

TARGET = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    hidden_act="silu",
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    attention_bias=False,
    tie_word_embeddings=False,
    bos_token_id=151643,
    eos_token_id=151645,
    torch_dtype="bfloat16",
)
# The published FlashMap-Qwen3-8B: 500M parameters, draft vocabulary of 32768 tokens.
FLASHMAP = dict(
    architectures=["FlashMapDraftModel"],
    model_type="flashmap",
    target_model="Qwen/Qwen3-8B",
    target_hidden_size=4096,
    vocab_size=151936,
    target_layer_ids=[1, 9, 17, 25, 33],
    block_size=16,
    hidden_size=2048,
    num_hidden_layers=6,
    num_attention_heads=16,
    intermediate_size=8192,
    draft_vocab_size=32768,
    torch_dtype="bfloat16",
)
# Upstream's block drafter with five target-wide layers, as z-lab published it.
DFLASH = {
    **TARGET,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "block_size": 16,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}


def write(folder: Path, config: dict) -> str:
    """Write ``config`` as ``folder/config.json``; the folder's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return str(folder)
