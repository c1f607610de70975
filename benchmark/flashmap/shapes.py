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


def target_parameters() -> int:
    """Weights of ``TARGET`` that a decode step multiplies with; the embedding is looked up."""
    width, kv = TARGET["hidden_size"], TARGET["num_key_value_heads"] * TARGET["head_dim"]
    heads = TARGET["num_attention_heads"] * TARGET["head_dim"]
    layer = width * (2 * heads + 2 * kv) + 3 * width * TARGET["intermediate_size"]
    return TARGET["num_hidden_layers"] * layer + TARGET["vocab_size"] * width


def draft_parameters(rows: str) -> int:
    """Weights of ``FLASHMAP`` that ``rows`` of a draft multiply with: ``slots`` or ``anchors``."""
    width, inner = FLASHMAP["hidden_size"], FLASHMAP["intermediate_size"]
    layers, target = FLASHMAP["num_hidden_layers"], FLASHMAP["target_hidden_size"]
    if rows == "anchors":
        return width * target + layers * 2 * width * width
    layer = 4 * width * width + 2 * width * width + 2 * width * inner
    return width * target + layers * layer + FLASHMAP["draft_vocab_size"] * width


def floor_ms(requests: int, context: int, *, rows: int, bandwidth: float, flops: float) -> float:
    """Least time of a bfloat16 step of ``rows`` a request: 1 plain, more with a draft."""
    target = target_parameters()
    kv = 4 * TARGET["num_hidden_layers"] * TARGET["num_key_value_heads"] * TARGET["head_dim"]
    moved, multiplied = 2 * target + requests * context * kv, requests * rows * target
    if rows > 1:
        slots, anchors = draft_parameters("slots"), draft_parameters("anchors")
        context_kv = 4 * FLASHMAP["num_hidden_layers"] * FLASHMAP["hidden_size"]
        moved += 2 * (slots + anchors) + requests * context * context_kv
        multiplied += requests * (FLASHMAP["block_size"] * slots + anchors)
    return max(moved / bandwidth, 2 * multiplied / flops) * 1e3


def write(folder: Path, config: dict) -> str:
    """Write ``config`` as ``folder/config.json``; the folder's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return str(folder)
