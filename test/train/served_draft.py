"""Greedy decoding with the served draft model (srt/models/flashmap.py), without a server."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel
from sglang.srt.speculative.flashmap.attention import ContextAttention
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig


class _Pool:
    def __init__(self, config: FlashMapConfig, slots: int) -> None:
        shape = (slots, config.num_key_value_heads, config.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values[layer]


def served_draft(release: Path, target: torch.nn.Module, *, untrained: bool = False):
    """The release's draft attached to a transformers target; `untrained` keeps random weights."""
    config = FlashMapConfig.from_pretrained(release)
    model = FlashMapDraftModel(config)
    weights = load_file(release / "model.safetensors")
    if untrained:
        weights = {name: torch.randn(weight.shape) * 0.2 for name, weight in weights.items()}
    model.load_weights(weights.items())
    model.attach_target(
        embedding=target.get_input_embeddings().weight.data,
        lm_head=target.get_output_embeddings().weight.data,
        lm_head_bias=None,
        logit_scale=1.0,
        serve=FlashMapServeConfig(
            block_size=config.block_size,
            verify_width=config.block_size + 1,
            grid=(0.0, 1.0),
            draft_vocab_size=0,
            block_verification=False,
        ),
        attention=ContextAttention(),
    )
    return model


@torch.no_grad()
def accept_length(
    model: FlashMapDraftModel, target: torch.nn.Module, prompt: list[int], new_tokens: int
) -> float:
    """Tokens a target pass when continuing `prompt` greedily."""
    tokens, passes, generator = list(prompt), 0, torch.Generator().manual_seed(0)
    tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    while len(tokens) < len(prompt) + new_tokens:
        drafts = _draft(model, target, tokens, generator)
        logits = target(torch.tensor([tokens + drafts])).logits[0, len(tokens) - 1 :]
        own = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == own[accepted]:
            accepted += 1
        tokens += drafts[:accepted] + [own[accepted]]
        passes += 1
    return (len(tokens) - len(prompt) - 1) / passes


def _draft(
    model: FlashMapDraftModel,
    target: torch.nn.Module,
    tokens: list[int],
    generator: torch.Generator,
) -> list[int]:
    """One block after `tokens`, the last of which is the anchor."""
    config, anchor = model.config, len(tokens) - 1
    states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    hidden = torch.cat([states[i + 1][0] for i in config.target_layer_ids], dim=-1)
    pool, places = _Pool(config, len(tokens)), torch.arange(len(tokens))
    model.write_target_hidden_kv(
        target_hidden=hidden, pool=pool, positions=places[:-1], cache_loc=places[:-1]
    )
    context = DraftContext(
        key_buffers=pool.keys,
        value_buffers=pool.values,
        req_to_token=places[None].int(),
        req_pool_indices=torch.tensor([0]),
        lens=torch.tensor([len(tokens)], dtype=torch.int32),
    )
    model.write_anchor(
        torch.tensor(tokens[-1:]),
        positions=torch.tensor([anchor]),
        slots=torch.tensor([anchor]),
        active=torch.ones(1, dtype=torch.int32),
        context=context,
    )
    noise = torch.randn(config.block_size, model.noise_width, generator=generator)
    slots = anchor + 1 + torch.arange(config.block_size)
    return model.draft_logits(noise, slots, context).argmax(-1).tolist()
