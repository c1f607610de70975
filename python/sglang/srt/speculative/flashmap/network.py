"""The modules of a FlashMap release, with the names of its tensors.

They hold weights and compute little: what a draft multiplies with is made of them once
(``FlashMapDraftModel.attach_target``), and what it computes is a step's, not a module's.

``scripts/train/network.py`` has the same tensors in modules that do compute: a trainer runs without
sglang. Both are held to the flashmap package by tests, and to ``checkpoint.expected_shapes``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.speculative.flashmap.projection import Modulation
from torch import nn


class Norm(nn.Module):
    """Holds ``weight (dim,)`` of an RMSNorm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim), requires_grad=False)


class TimeEmbedding(nn.Module):
    """Sinusoidal features of a time in [0, 1], then an MLP: ``(n,) -> (n, cond_dim)``."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.dim, self.scale = config.time_embed_dim, config.time_scale
        self.linear_1 = nn.Linear(config.time_embed_dim, config.cond_dim)
        self.linear_2 = nn.Linear(config.cond_dim, config.cond_dim)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        half = self.dim // 2
        exponents = torch.arange(half, device=t.device, dtype=torch.float32) / half
        angles = (t.float() * self.scale)[:, None] * torch.exp(-math.log(10000.0) * exponents)
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.linear_2(F.silu(self.linear_1(features.to(self.linear_1.weight.dtype))))


class AdaLN(nn.Module):
    """Holds the projection of the time conditioning to ``(scale, shift, gate)``."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.cond_dim, 3 * config.hidden_size)

    def modulation(self, cond: torch.Tensor) -> Modulation:
        scale, shift, gate = self.linear(F.silu(cond))[0].chunk(3)
        return Modulation((1 + scale).contiguous(), shift.contiguous(), gate.contiguous())


class Attention(nn.Module):
    """Holds the projections and q/k norms of one attention."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        dim, kv_dim = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm = Norm(config.head_dim)
        self.k_norm = Norm(config.head_dim)


class MLP(nn.Module):
    """Holds the two products around GELU."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)


class Layer(nn.Module):
    """Self-attention in the block, cross-attention to the context, MLP, each behind its AdaLN."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.self_attn_adaln = AdaLN(config)
        self.self_attn = Attention(config)
        self.cross_attn_adaln = AdaLN(config)
        self.cross_attn = Attention(config)
        self.mlp_adaln = AdaLN(config)
        self.mlp = MLP(config)
