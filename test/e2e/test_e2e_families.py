"""Targets of several families and drafts of several shapes: greedy ids are transformers' own.

An oracle drafter proposes the right tokens most of the time, so that whole blocks are committed; it
writes its context and reads its target as any draft does. Draft weights are random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts.folders import write_oracle
from drafts.replay import Corruption, Reference
from e2e_cases import BLOCK_SIZE, flashmap_server
from tiny_model import SIZES, write_tiny_model

NEW_TOKENS = 40
PROMPTS = ["Hello", "The quick brown fox jumps over", "x" * 90]

# Target and its sizes, sizes of the draft.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Upstream pads the vocabulary's tables to 384 rows.
    "qwen3-padded-D64": ("qwen3", dict(vocab_size=331), dict(hidden_size=128)),
    "llama-tied-D96-grouped": (
        "llama",
        dict(tie_word_embeddings=True),
        dict(hidden_size=192, num_key_value_heads=1),
    ),
    # Heads of another width than hidden size over heads.
    "qwen3-tied-D128": (
        "qwen3",
        dict(tie_word_embeddings=True, head_dim=32),
        dict(hidden_size=256, draft_vocab_size=200),
    ),
}


def draft_config(target: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    return dict(
        architectures=["FlashMapDraftModel"],
        model_type="flashmap",
        target_model="tiny",
        target_hidden_size=target["hidden_size"],
        vocab_size=target["vocab_size"],
        target_layer_ids=[0],
        block_size=BLOCK_SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        dtype="float32",
        **sizes,
    )


def greedy(folder: Path, prompt: str) -> Reference:
    """What transformers says, by what the last block of an oracle can run over longer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    output = model.generate(
        ids,
        max_new_tokens=NEW_TOKENS + BLOCK_SIZE,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    return Reference(tuple(output[: ids.shape[1]]), tuple(output[ids.shape[1] :]))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids(family: str, tmp_path: Path) -> None:
    kind, sizes, draft = FAMILIES[family]
    target = write_tiny_model(tmp_path / "target", kind, **sizes)
    base = tmp_path / "base"
    base.mkdir()
    config = draft_config({**SIZES, **sizes}, **draft)
    (base / "config.json").write_text(json.dumps(config))
    references = [greedy(target, prompt) for prompt in PROMPTS]
    assert len({token for r in references for token in r.completion}) > 8
    oracle = write_oracle(tmp_path / "oracle", base, references, Corruption((0.1,), seed=1))
    # Random weights, of this draft's shapes.
    args = ("--speculative-draft-load-format", "dummy", "--max-total-tokens", 2048)
    with flashmap_server(target, oracle, *args) as server:
        answers = server.generate(
            [list(r.prompt) for r in references], max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
    for answer, reference in zip(answers, references, strict=True):
        assert answer["output_ids"] == list(reference.completion[:NEW_TOKENS])
        # Drafts are accepted; a token outside a draft vocabulary costs a step of its own.
        assert answer["meta_info"]["spec_verify_ct"] < NEW_TOKENS * 3 / 4
