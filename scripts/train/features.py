"""What a draft reads of its target: a frozen transformers model.

Conversations are right-padded. Attention is causal, so a padded position changes no earlier one:
no mask is needed, positions are those that serving uses, and the same call is right for any causal
language model, with a sliding window too. Batches are of conversations of similar length
(`anchors.py`), so little is wasted on padding.

`hidden_states[i + 1]` of a transformers forward is the output of decoder layer `i`, unnormed for
every layer but the last: the reason that a draft cannot read the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fork.errors import ForkError
from torch import nn

from train.noise import noise_factor


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
        self._layer_ids = layer_ids
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

    @torch.no_grad()
    def hidden_states(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `tokens (B, S)`: the draft's context `(B, S, layers · H)`, and the states
        `(B, S, H)` that the LM head reads."""
        body = self._model.get_decoder()
        out = body(input_ids=tokens, output_hidden_states=True, use_cache=False)
        context = torch.cat([out.hidden_states[i + 1] for i in self._layer_ids], dim=-1)
        return context, out.last_hidden_state


class RememberingReader(TargetReader):
    """Keeps every conversation's states in memory: for little data on a slow machine.

    A token costs (layers + 1) · H numbers.
    """

    def __init__(self, model: Any, layer_ids: list[int]) -> None:
        super().__init__(model, layer_ids)
        self._known: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}

    def hidden_states(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self._row(row, tokens.shape[1]) for row in tokens]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    def _row(self, tokens: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        # One conversation comes padded to several widths; what padding adds is never read.
        key = tokens.cpu().numpy().tobytes().rstrip(b"\0")
        known = self._known.get(key)
        if known is None or known[0].shape[0] < width:
            context, final = super().hidden_states(tokens[None])
            known = self._known[key] = context[0], final[0]
        return known[0][:width], known[1][:width]
