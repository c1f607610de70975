"""A Llama model in a GGUF file, as the parts of a Hugging Face folder.

Three facts separate the two formats:
1. Weights are quantised in blocks. `gguf` expands them to float32, which holds a Q4_1 or Q8_0
   weight (scale * integer + offset, in half precision) as llama.cpp computes it; bfloat16 would
   round most of them.
2. llama.cpp rotates adjacent pairs, so its query and key rows are interleaved: row (i, h) of a
   head, h the half, is stored at (2 i + h). Hugging Face wants the halves one after the other.
3. The tokenizer is a list of tokens and merges plus the name of its pre-tokenizer. `smollm` splits
   off each single digit, then splits like GPT-2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fork.errors import ForkError
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL_TOKEN = 3
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFLlama:
    """A GGUF file of architecture `llama` with a GPT-2 style tokenizer.

    Raises ForkError when the file at `path` is another kind of model.
    """

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        kind = [self._field(name) for name in ("general.architecture", "tokenizer.ggml.pre")]
        if kind != ["llama", "smollm"]:
            raise ForkError(
                f"{path.name} is a {kind[0]} model with a {kind[1]} tokenizer; "
                "only llama with smollm is known here."
            )

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    def config(self, dtype: str) -> dict[str, Any]:
        """`config.json` for weights stored in `dtype`."""
        heads = self._field("llama.attention.head_count")
        # float32 in the file; its shortest decimal form is the number the model was trained with.
        epsilon = float(str(np.float32(self._field("llama.attention.layer_norm_rms_epsilon"))))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self._field("llama.vocab_size"),
            "hidden_size": self._field("llama.embedding_length"),
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv"),
            "head_dim": self._field("llama.embedding_length") // heads,
            "max_position_embeddings": self._field("llama.context_length"),
            "rope_theta": self._field("llama.rope.freq_base"),
            "rms_norm_eps": epsilon,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in {t.name for t in self._reader.tensors},
            "torch_dtype": dtype,
            **self.generation_config(),
        }

    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`."""
        return {
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
        }

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Hugging Face name and float32 value of every weight; a matrix is (outputs, inputs)."""
        heads = {
            "attn_q": self._field("llama.attention.head_count"),
            "attn_k": self._field("llama.attention.head_count_kv"),
        }
        for tensor in self._reader.tensors:
            # A copy, since an unquantised tensor is a read-only view of the file.
            value = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if tensor.name in _TOP:
                yield _TOP[tensor.name], value
                continue
            layer, part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name).groups()
            if part in heads:
                value = _split_halves(value, heads[part])
            yield f"model.layers.{layer}.{_LAYER[part]}.weight", value

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, special tokens included.

        Its alphabet lacks 21 bytes, which valid text hardly ever contains (a few control characters
        and bytes that UTF-8 does not use); they are dropped.
        """
        tokens, kinds = (
            self._field("tokenizer.ggml.tokens"),
            self._field("tokenizer.ggml.token_type"),
        )
        merges = [tuple(pair.split(" ")) for pair in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == _CONTROL_TOKEN
            ]
        )
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """`tokenizer_config.json`, chat template included."""
        tokens = self._field("tokenizer.ggml.tokens")
        ids = {
            "bos_token": "bos_token_id",
            "eos_token": "eos_token_id",
            "pad_token": "padding_token_id",
            "unk_token": "unknown_token_id",
        }
        return {
            # The class that takes tokenizer.json as it is; GPT2Tokenizer would merge digits.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: tokens[self._field(f"tokenizer.ggml.{key}")] for name, key in ids.items()},
            "model_max_length": self._field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": self._field("tokenizer.chat_template"),
        }


def _split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs to first halves, then second halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
