"""Cross-entropy through the frozen LM head, without keeping logits.

    loss = Σ_n w_n · (logsumexp(W h_n + b) − Σ_v q_nv (W h_n + b)_v)

Only `h` is trained, so its gradient `w_n (softmax − q_n) W` is formed in the forward, one chunk of
rows at a time: memory is `_CHUNK_NUMBERS` logits however many rows there are, and nothing is
computed twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

_CHUNK_NUMBERS = 1 << 28
Target = Callable[[slice], torch.Tensor]
"""Rows → their target: token ids `(n,)` int64, or distributions `(n, V)` float32."""


def chunk_rows(vocab_size: int) -> int:
    """Rows whose logits are in memory at a time."""
    return max(1, _CHUNK_NUMBERS // vocab_size)


def logits_of(hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
    """`(n, V)` float32 logits of `hidden (n, H)`."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(lm_head.weight.dtype), lm_head.weight, lm_head.bias).float()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weights, lm_head, target):  # noqa: ANN001, ANN205
        gradient = torch.empty_like(hidden)
        loss = torch.zeros((), device=hidden.device)
        rows = chunk_rows(lm_head.weight.shape[0])
        for start in range(0, len(hidden), rows):
            part = slice(start, min(start + rows, len(hidden)))
            logits, wanted, weight = logits_of(hidden[part], lm_head), target(part), weights[part]
            normaliser = logits.logsumexp(-1)
            if wanted.dim() == 1:
                hit = logits.gather(1, wanted[:, None])[:, 0]
            else:
                hit = (wanted * logits).sum(-1)
            loss += (weight * (normaliser - hit)).sum()
            excess = logits.sub_(normaliser[:, None]).exp_()
            if wanted.dim() == 1:
                excess.scatter_add_(1, wanted[:, None], -torch.ones_like(hit)[:, None])
            else:
                excess -= wanted
            excess *= weight[:, None]
            # In the head's dtype a weight of 1 / rows is scaled by a power of two first, or it
            # would underflow in float16.
            gradient[part] = (excess.mul_(1 << 12).to(lm_head.weight.dtype) @ lm_head.weight).to(
                gradient.dtype
            ) / (1 << 12)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None


def cross_entropy(
    hidden: torch.Tensor, weights: torch.Tensor, lm_head: nn.Module, target: Target
) -> torch.Tensor:
    """The loss above, a scalar, of `hidden (n, H)` with `weights (n,)`."""
    with torch.autocast(hidden.device.type, enabled=False):
        return _CrossEntropy.apply(hidden.float(), weights, lm_head, target)
