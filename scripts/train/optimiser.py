"""AdamW, its learning rate over a run, and the moving average of the weights that is released."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from train.recipe import Recipe

_LAST = 0.05
"""The learning rate ends at this part of its peak."""


def make_optimiser(network: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Matrices decay; biases, norms and the noise gate do not."""
    matrices = [p for p in network.parameters() if p.dim() == 2]
    others = [p for p in network.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = next(network.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=fused)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then half a cosine."""
    warmup = max(1, round(recipe.warmup * recipe.steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    part = (step - warmup) / max(1, recipe.steps - warmup)
    return recipe.learning_rate * (_LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * part)))


class MovingAverage:
    """Exponential moving average of a network's weights; `network` holds it, without gradients."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network).requires_grad_(False)
        self._decay = decay

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """After optimiser step `step` (from 0); early steps are forgotten faster."""
        decay = min(self._decay, (1 + step) / (10 + step))
        mine, theirs = list(self.network.parameters()), list(network.parameters())
        torch._foreach_lerp_(mine, theirs, 1.0 - decay)
