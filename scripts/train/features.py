"""What a draft reads of its target: a frozen transformers model.

Conversations are right-padded. Attention is causal, so a padded position changes no earlier one:
no mask is needed, positions are those that serving uses, and the same call is right for any causal
language model, with a sliding window too. Batches are of conversations of similar length
(`anchors.py`), so little is wasted on padding.

`hidden_states[i + 1]` of a transformers forward is the output of decoder layer `i`, unnormed for
every layer but the last: the reason that a draft cannot read the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fork.errors import ForkError
from torch import nn

from train.anchors import Batch
from train.noise import noise_factor
from train.token_file import TokenFiles

_TOKENS_AT_ONCE = 1 << 14
"""Read of the target in one forward, when all its states are remembered."""


def load_tokenizer(folder: Path) -> Any:
    """Raises ForkError when `folder` is no Hugging Face model with a tokenizer."""
    from transformers import AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ForkError(f"--target {folder} is no Hugging Face model's folder: give one.")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ForkError(
            f"--target {folder} has no usable tokenizer ({str(error).splitlines()[0]})."
        ) from None


def load_target(folder: Path, device: str | None = None, dtype: str | None = None) -> Any:
    """The frozen target, on a GPU in bfloat16 where there is one, else in float32.

    Raises ForkError when `folder` holds no causal language model.
    """
    from transformers import AutoModelForCausalLM

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ForkError(
            f"--target {folder} cannot be loaded ({str(error).splitlines()[0]}): "
            "give a causal language model's folder."
        ) from None
    return model.to(device).eval().requires_grad_(False)


class TargetReader:
    """Hidden states, logits and embedding of a frozen target."""

    def __init__(self, model: Any, layer_ids: list[int]) -> None:
        self._model = model
        self.config, self.layer_ids = model.config, list(layer_ids)
        self.embedding: torch.Tensor = model.get_input_embeddings().weight
        """`E (V, H)`."""
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.factor = noise_factor(self.embedding)
        """`F (H, H)` float32, `F Fᵀ = EᵀE`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The target's."""
        return self._model.parameters()

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def read(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden_states` of a batch's conversations."""
        return self.hidden_states(batch.tokens)

    @torch.no_grad()
    def hidden_states(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `tokens (B, S)`: the draft's context `(B, S, layers · H)`, and the states
        `(B, S, H)` that the LM head reads."""
        body = self._model.get_decoder()
        out = body(input_ids=tokens, output_hidden_states=True, use_cache=False)
        context = torch.cat([out.hidden_states[i + 1] for i in self.layer_ids], dim=-1)
        return context, out.last_hidden_state


class RememberingReader(TargetReader):
    """Reads the target once: the states of all data stay in the device's memory.

    A token costs `(layers + 1) · H` numbers; a step then spends nothing on the target but its head.
    """

    def __init__(
        self, model: Any, layer_ids: list[int], files: TokenFiles, max_length: int
    ) -> None:
        """Raises ForkError when the states do not fit the device's memory."""
        super().__init__(model, layer_ids)
        lengths = np.minimum(files.lengths(), max_length)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        total, width, dtype = int(starts[-1]), self.embedding.shape[1], self.embedding.dtype
        _check_memory(total * (len(layer_ids) + 1) * width * dtype.itemsize, self.device)
        self._context = torch.empty(total, len(layer_ids) * width, dtype=dtype, device=self.device)
        self._final = torch.empty(total, width, dtype=dtype, device=self.device)
        self._starts = torch.from_numpy(starts).to(self.device)
        order, first = np.argsort(lengths, kind="stable"), 0
        while first < len(order):
            last = first + max(1, _TOKENS_AT_ONCE // int(lengths[order[first]]))
            self._fill(files, order[first:last], lengths)
            first = last

    def _fill(self, files: TokenFiles, indices: np.ndarray, lengths: np.ndarray) -> None:
        tokens = np.zeros((len(indices), int(lengths[indices].max())), np.int64)
        for row, index in enumerate(indices):
            tokens[row, : lengths[index]] = files[int(index)].tokens[: lengths[index]]
        context, final = self.hidden_states(torch.from_numpy(tokens).to(self.device))
        for row, index in enumerate(indices):
            start, length = int(self._starts[index]), int(lengths[index])
            self._context[start : start + length] = context[row, :length]
            self._final[start : start + length] = final[row, :length]

    def read(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        starts, ends = self._starts[batch.conversations], self._starts[batch.conversations + 1]
        steps = torch.arange(batch.tokens.shape[1], device=self.device)
        # Beyond a conversation's end its last state stands; no block reads there.
        places = torch.minimum(starts[:, None] + steps, ends[:, None] - 1)
        return self._context[places], self._final[places]


def _check_memory(size: int, device: torch.device) -> None:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > 0.9 * free:
        raise ForkError(
            f"--remember needs {size / 1e9:.1f} GB for the target's states and {free / 1e9:.1f} GB "
            "are free: leave it out, or train on less data."
        )
