"""The trainable draft: the DiT of FlashMap, its tensors named as a checkpoint names them.

One forward evaluates the jump `s → t` for `A` blocks of each of `B` conversations at once:

    context entry at j:  hidden_norm(fc(target hidden states at j)), rotated at j
    anchor entry:        anchor_norm(anchor_proj(E[token])), rotated at the anchor's position a
    block slot k:        rotated at a + 1 + k

A block's slots attend to each other and to the context entries before its anchor plus its own
anchor's entry: what a server has at that moment, since the anchor's hidden state does not exist
yet. Blocks of one conversation share the projected context and are told apart by the mask alone.

Everything is a fixed-shape tensor operation without a host sync, so `torch.compile` takes it whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from train.draft_config import FlashMapConfig

Rope = tuple[torch.Tensor, torch.Tensor]


def rope_angles(positions: torch.Tensor, head_dim: int, theta: float) -> Rope:
    """`cos`, `sin` `(…, 1, head_dim / 2)` float32 of `positions (…)`."""
    index = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None, None] / theta ** (index / head_dim)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates the channel pairs (2i, 2i+1) of `x (…, heads, head_dim)` in float32."""
    cos, sin = rope
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).type_as(x)


class RMSNorm(nn.Module):
    """`x · round(weight · rsqrt(mean(x²) + eps))`: the scale is rounded to x's dtype first."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return x * (self.weight.float() * scale).to(x.dtype)


class TimeEmbedding(nn.Module):
    """`(…,)` times in [0, 1] → `(…, cond_dim)`."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.dim, self.scale = config.time_embed_dim, config.time_scale
        self.linear_1 = nn.Linear(config.time_embed_dim, config.cond_dim)
        self.linear_2 = nn.Linear(config.cond_dim, config.cond_dim)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        half = self.dim // 2
        steps = torch.arange(half, device=t.device, dtype=torch.float32)
        angles = (t.float() * self.scale)[..., None] * torch.exp(-math.log(1e4) * steps / half)
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.linear_2(F.silu(self.linear_1(features.to(self.linear_1.weight.dtype))))


class AdaLN(nn.Module):
    """LayerNorm scaled and shifted by the time conditioning, with a gate for its branch."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.cond_dim, 3 * config.hidden_size)
        self.eps = config.layer_norm_eps

    def forward(self, x: torch.Tensor, cond: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x (N, K, d)`, `cond (N, c)` → `(N, K, d)` and the gate `(N, 1, d)`."""
        scale, shift, gate = self.linear(F.silu(cond))[:, None].chunk(3, dim=-1)
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift, gate


class Attention(nn.Module):
    """Attention with RMS-normed, rotated queries and keys."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        dim, self.head_dim = config.hidden_size, config.head_dim
        kv_dim = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.qk_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.qk_norm_eps)
        self._grouped = config.num_key_value_heads != config.num_attention_heads

    def keys_values(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `x (N, T, d)`, each `(N, T, kv heads, D)`."""
        split = (-1, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, split)), rope)
        return keys, self.v_proj(x).unflatten(-1, split)

    def forward(
        self,
        x: torch.Tensor,
        rope: Rope,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x (N, Q, d)` attends to `keys`, `values (N, T, kv heads, D)` where `mask` is true."""
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rope)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2).type_as(query),
            values.transpose(1, 2).type_as(query),
            attn_mask=mask,
            enable_gqa=self._grouped,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.self_attn_adaln = AdaLN(config)
        self.self_attn = Attention(config)
        self.cross_attn_adaln = AdaLN(config)
        self.cross_attn = Attention(config)
        self.mlp_adaln = AdaLN(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        cond: torch.Tensor,
        rope: Rope,
        context: torch.Tensor,
        context_rope: Rope,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """`x (B·A, K, d)`, `context (B, T, d)`, `mask (B, 1, A·K, T)`."""
        batch, slots = context.shape[0], x.shape[1]
        h, gate = self.self_attn_adaln(x, cond)
        x = x + gate * self.self_attn(h, rope, *self.self_attn.keys_values(h, rope))
        h, gate = self.cross_attn_adaln(x, cond)
        # All blocks of a conversation read its context in one attention.
        query_rope = tuple(part.reshape(batch, -1, *part.shape[2:]) for part in rope)
        attended = self.cross_attn(
            h.reshape(batch, -1, h.shape[-1]),
            query_rope,
            *self.cross_attn.keys_values(context, context_rope),
            mask=mask,
        )
        x = x + gate * attended.view(-1, slots, attended.shape[-1])
        h, gate = self.mlp_adaln(x, cond)
        return x + gate * self.mlp(h)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch: what they are conditioned on.

    `hidden (B, S, layers · H)` the target's hidden states, `anchors (B, A)` positions below S,
    `anchor_embedding (B, A, H)` rows of E.
    """

    hidden: torch.Tensor
    anchors: torch.Tensor
    anchor_embedding: torch.Tensor


class DraftNetwork(nn.Module):
    """See the module docstring. New weights: open gates, a head that starts near uniform."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.config = config
        dim, target = config.hidden_size, config.target_hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * target, dim, bias=False)
        self.hidden_norm = RMSNorm(dim, config.rms_norm_eps)
        self.anchor_proj = nn.Linear(target, dim)
        self.anchor_norm = RMSNorm(dim, config.rms_norm_eps)
        self.state_norm = RMSNorm(target, config.rms_norm_eps)
        self.noise_norm = RMSNorm(target, config.rms_norm_eps)
        self.noise_gate = nn.Parameter(torch.ones(1))
        self.x_embed = nn.Linear(target, dim)
        self.time_embed = TimeEmbedding(config)
        self.jump_embed = TimeEmbedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.final_adaln = AdaLN(config)
        self.head = nn.Linear(dim, target)
        self._initialise()

    def _initialise(self) -> None:
        depth = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                closing = name.endswith(("o_proj.weight", "fc2.weight"))
                std = parameter.shape[1] ** -0.5 * (depth if closing else 1.0)
                nn.init.normal_(parameter, std=0.02 if name == "head.weight" else std)
        for module in self.modules():
            if isinstance(module, AdaLN):
                nn.init.zeros_(module.linear.weight)
                nn.init.ones_(module.linear.bias[2 * self.config.hidden_size :])

    def forward(
        self,
        posterior: torch.Tensor,
        linear: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        blocks: Blocks,
    ) -> torch.Tensor:
        """Hidden states whose LM-head logits are where the jump lands.

        Args:
            posterior, linear: `(B, A, K, H)`, the two terms of the state (`noise.read_state`);
                the posterior broadcasts.
            start, end: `(B, A)` times `s ≤ t`.

        Returns:
            `(B, A, K, H)`.
        """
        config = self.config
        batch, count, slots, _ = linear.shape
        jump = (end - start)[..., None, None] if config.noise_gate == "jump" else 1.0
        noise = self.noise_norm(linear) * (self.noise_gate.float() * jump)
        x = self.x_embed(self.state_norm(posterior) + noise.to(linear.dtype))
        x = x.view(batch * count, slots, -1)
        cond = (self.time_embed(start) + self.jump_embed(end)).view(batch * count, -1)

        entries = self.hidden_norm(self.fc(blocks.hidden.to(self.fc.weight.dtype)))
        own = self.anchor_norm(self.anchor_proj(blocks.anchor_embedding.to(self.fc.weight.dtype)))
        context = torch.cat([entries, own], dim=1)
        length = entries.shape[1]
        places = torch.arange(length, device=x.device)
        positions = torch.cat([places.expand(batch, -1), blocks.anchors], dim=1)
        context_rope = rope_angles(positions, config.head_dim, config.rope_theta)
        steps = torch.arange(1, slots + 1, device=x.device)
        rope = rope_angles(
            (blocks.anchors[..., None] + steps).view(-1, slots), config.head_dim, config.rope_theta
        )
        mask = _visible(blocks.anchors, length).repeat_interleave(slots, dim=1)[:, None]
        for layer in self.layers:
            x = layer(x, cond, rope, context, context_rope, mask)
        x, _ = self.final_adaln(x, cond)
        return self.head(x).view(batch, count, slots, -1)


def _visible(anchors: torch.Tensor, length: int) -> torch.Tensor:
    """`(B, A, S + A)`: the entries that each block may read."""
    batch, count = anchors.shape
    before = torch.arange(length, device=anchors.device) < anchors[..., None]
    own = torch.eye(count, dtype=torch.bool, device=anchors.device)
    return torch.cat([before, own.expand(batch, -1, -1)], dim=-1)


def parameter_count(config: FlashMapConfig) -> int:
    """Parameters of a draft with this config, without making it."""
    with torch.device("meta"):
        return sum(p.numel() for p in DraftNetwork(config).parameters())
