"""One set of random draft weights in two implementations: ours and the flashmap package's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashmap
import torch
from flashmap.modeling_flashmap import FlashMapCache
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel
from sglang.srt.speculative.flashmap.attention import ContextAttention
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig

VOCAB, TARGET_HIDDEN, LAYER_IDS = 211, 48, (0, 2, 3)
PREFIX_LENS = (11, 1, 23)
"""Committed positions of the requests that `Requests` makes."""


def draft_sizes(head_dim: int = 64, **sizes: Any) -> dict[str, Any]:
    """Config keys of a small draft of two layers and two heads of `head_dim`; `sizes` override."""
    return {
        "target_hidden_size": TARGET_HIDDEN,
        "vocab_size": VOCAB,
        "target_layer_ids": list(LAYER_IDS),
        "block_size": 8,
        "hidden_size": 2 * head_dim,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "cond_dim": 32,
        "time_embed_dim": 16,
        **sizes,
    }


@dataclass(frozen=True)
class Target:
    """What a draft reads of its target."""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    bias: torch.Tensor | None = None
    logit_scale: float = 1.0

    @classmethod
    def random(cls, *, tied: bool = False, bias: bool = False, **more: Any) -> Target:
        embedding = 0.3 * torch.randn(VOCAB, TARGET_HIDDEN)
        lm_head = embedding if tied else 0.3 * torch.randn(VOCAB, TARGET_HIDDEN)
        return cls(embedding, lm_head, torch.randn(VOCAB) if bias else None, **more)

    def modules(self) -> tuple[torch.nn.Embedding, torch.nn.Linear]:
        """`(embed_tokens, lm_head)` as the package takes them."""
        head = torch.nn.Linear(TARGET_HIDDEN, VOCAB, bias=self.bias is not None)
        head.weight.data = self.lm_head * self.logit_scale
        if self.bias is not None:
            head.bias.data = self.bias * self.logit_scale
        return torch.nn.Embedding.from_pretrained(self.embedding), head.requires_grad_(False)


class Pool:
    """Key and value buffers `(slots, kv heads, D)` a layer, full of a value no draft reads."""

    def __init__(
        self, config: FlashMapConfig, slots: int, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (slots, config.num_key_value_heads, config.head_dim)
        layers, fill = range(config.num_hidden_layers), min(1e3, torch.finfo(dtype).max)
        self.keys = [torch.full(shape, fill, dtype=dtype) for _ in layers]
        self.values = [torch.full(shape, fill, dtype=dtype) for _ in layers]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values[layer]

    def snapshot(self) -> torch.Tensor:
        """`(layers, 2, slots, kv heads, D)`, a copy."""
        return torch.stack([torch.stack(pair) for pair in zip(self.keys, self.values, strict=True)])


class Requests:
    """Requests of `PREFIX_LENS` committed positions, slots scattered, rows permuted."""

    def __init__(self, config: FlashMapConfig) -> None:
        self.lens = torch.tensor(PREFIX_LENS)
        self.hidden = [torch.randn(n, len(LAYER_IDS) * TARGET_HIDDEN) for n in PREFIX_LENS]
        self.anchors = torch.randint(VOCAB, (len(PREFIX_LENS),))
        self.rows = torch.tensor([4, 0, 2])
        capacity = max(PREFIX_LENS) + config.block_size + 1
        self.num_slots = 5 * capacity + 1
        slots = 1 + torch.randperm(self.num_slots - 1)
        self.req_to_token = slots.view(5, capacity).int()

    def slots(self, request: int, start: int, end: int) -> torch.Tensor:
        """Pool slots of positions `start .. end` of a request, int64."""
        return self.req_to_token[self.rows[request], start:end].long()

    def write_context(self, model: FlashMapDraftModel, pool: Pool) -> None:
        """Commits every request's hidden states in one ragged batch."""
        model.write_target_hidden_kv(
            target_hidden=torch.cat(self.hidden),
            pool=pool,
            positions=torch.cat([torch.arange(n) for n in PREFIX_LENS]),
            cache_loc=torch.cat([self.slots(b, 0, n) for b, n in enumerate(PREFIX_LENS)]),
        )

    def context(self, pool: Pool) -> DraftContext:
        """Each request's context up to and with its anchor."""
        return DraftContext(
            key_buffers=pool.keys,
            value_buffers=pool.values,
            req_to_token=self.req_to_token,
            req_pool_indices=self.rows,
            lens=(self.lens + 1).int(),
        )

    def write_anchors(self, model: FlashMapDraftModel, pool: Pool, side=None) -> DraftContext:
        return model.write_anchor(
            self.anchors,
            positions=self.lens,
            slots=self.req_to_token[self.rows, self.lens].long(),
            active=torch.ones(len(PREFIX_LENS), dtype=torch.int32),
            context=self.context(pool),
            side=side,
        )

    def slot_positions(self, block_size: int, num_candidates: int = 1) -> torch.Tensor:
        """Positions `(B · N · K,)` of the drafted slots."""
        steps = torch.arange(1, block_size + 1).repeat(num_candidates)
        return (self.lens[:, None] + steps).flatten()


class DraftPair:
    """`model`, ours, and `reference`, the package's, with the same weights and target."""

    def __init__(
        self,
        *,
        target: Target | None = None,
        draft_vocab_size: int = 0,
        ranking: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        **sizes: Any,
    ) -> None:
        keys = draft_sizes(**sizes)
        self.config = FlashMapConfig(**keys)
        self.target = target or Target.random()
        self.reference = None
        if self.config.num_key_value_heads == self.config.num_attention_heads:
            self.reference = flashmap.FlashMapDraftModel(flashmap.FlashMapConfig(**keys)).eval()
        self.model = FlashMapDraftModel(self.config)
        self.weights = random_weights(self.model)
        loaded = dict(self.weights)
        if ranking is not None:
            loaded["ids"] = ranking
        self.model.to(dtype).load_weights(loaded.items())
        if self.reference is not None:
            self.reference.load_state_dict(self.weights)
            self.reference.requires_grad_(False).to(dtype)
        self.attach(draft_vocab_size)

    def attach(self, draft_vocab_size: int = 0, **settings: Any) -> None:
        """Makes `model` ready to draft; `settings` are fields of `FlashMapServeConfig`."""
        serve = FlashMapServeConfig(
            block_size=self.config.block_size,
            verify_width=self.config.block_size + 1,
            grid=tuple(self.config.grid()),
            draft_vocab_size=draft_vocab_size,
            block_verification=False,
            **settings,
        )
        self.model.attach_target(
            embedding=self.target.embedding.to(self.model.dtype),
            lm_head=self.target.lm_head.to(self.model.dtype),
            lm_head_bias=self.target.bias,
            logit_scale=self.target.logit_scale,
            serve=serve,
            attention=ContextAttention(),
        )

    def prepare(self, requests: Requests) -> Pool:
        """A pool that holds the requests' contexts and anchors."""
        pool = Pool(self.config, requests.num_slots, self.model.dtype)
        requests.write_context(self.model, pool)
        requests.write_anchors(self.model, pool)
        return pool

    def reference_cache(self, requests: Requests, request: int) -> FlashMapCache:
        """The package's context of one request, without the anchor."""
        cache = FlashMapCache(self.reference.config, 1, 64, dtype=self.model.dtype)
        self.reference.extend_context(cache, requests.hidden[request][None])
        return cache

    def reference_logits(
        self, requests: Requests, request: int, *, noise: torch.Tensor | None = None, seed: int = 0
    ) -> torch.Tensor:
        """The package's draft `(K, V)` of a request, from `noise (K, V)` or a generator's seed."""
        embed, head = (module.to(self.model.dtype) for module in self.target.modules())
        return self.reference.draft(
            requests.anchors[request : request + 1],
            self.reference_cache(requests, request),
            embed,
            head,
            self.config.num_steps,
            noise=None if noise is None else noise[None],
            generator=torch.Generator().manual_seed(seed),
        )[0]

    def seeded_noise(self, num_requests: int) -> torch.Tensor:
        """What `reference_logits` draws for seeds `0 .. num_requests`: `(B · K, noise_width)`."""
        shape = (1, self.config.block_size, self.model.noise_width)
        return torch.cat(
            [
                torch.randn(
                    shape, generator=torch.Generator().manual_seed(b), dtype=self.model.dtype
                )[0]
                for b in range(num_requests)
            ]
        )


def random_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Random values for every parameter, scaled so that no term of the network is negligible."""
    weights = {}
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape)
        if name.endswith(".bias"):
            value *= 0.3
        elif value.dim() == 1:
            value = 1 + 0.3 * value
        else:
            value /= parameter.shape[-1] ** 0.5
        weights[name] = value
    return weights


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
