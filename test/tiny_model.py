"""Tiny random targets with a byte tokenizer: real checkpoints a server loads in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    initializer_range=0.5,
    eos_token_id=0,
    bos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)

GEMMA2: dict[str, Any] = dict(
    tie_word_embeddings=True,
    sliding_window=16,
    attn_logit_softcapping=2.0,
    query_pre_attn_scalar=16,
    hidden_act="gelu_pytorch_tanh",  # upstream reads it besides hidden_activation
)


CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat is its text."""


def write_tiny_model(
    folder: Path,
    kind: str = "llama",
    seed: int = 0,
    chat_template: str | None = None,
    **sizes: Any,
) -> Path:
    """Write a float32 checkpoint and its tokenizer into `folder`; returns `folder`.

    `kind` is "llama", "qwen3" or "gemma2" (tied embeddings, sliding window, capped logits); `sizes`
    override `SIZES`. Weights depend on `seed` only.
    The tokenizer maps each UTF-8 byte to its own id, and ids 256 and up to `<t256>` and so on.
    """
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    }[kind]
    if kind == "gemma2":
        sizes = {**GEMMA2, **sizes}
    config = config_class(**{**SIZES, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
    if kind == "gemma2":  # tied and random, it would repeat its input
        for name, parameter in model.named_parameters():
            if ".post_" in name:
                parameter.data += 30
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(config.vocab_size)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer(vocab_size: int) -> Any:
    """A `PreTrainedTokenizerFast` with one token per byte and no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet: printable stand-ins for all 256 bytes.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {f"<t{i}>": i for i in range(len(alphabet), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0])
