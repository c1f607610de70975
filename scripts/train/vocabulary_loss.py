"""Cross-entropy through the frozen LM head, without keeping logits.

    loss = Σ_n w_n · (logsumexp(W h_n + b) − Σ_v q_nv (W h_n + b)_v)

Only `h` is trained, so its gradient `w_n (softmax − q_n) W` is formed in the forward, one chunk of
rows at a time: memory is `_CHUNK_NUMBERS` logits however many rows there are, and nothing is
computed twice. On a GPU the softmaxes, the loss and the gradient of the logits are one kernel
(`softmax_gradient.py`) that leaves the gradient where the logits were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

_CHUNK_NUMBERS = 1 << 28
# In the head's dtype a weight of 1 / rows is scaled by a power of two first, or it would underflow
# in float16.
SCALE = float(1 << 12)


@dataclass(frozen=True)
class Tokens:
    """One-hot targets: ids `(n,)` int64."""

    ids: torch.Tensor


@dataclass(frozen=True)
class Heads:
    """What the LM head makes of hidden states `first (n, H)`: `softmax(W first + b)`; mixed as
    `share · first's + (1 − share) · second's`, `share (n,)`, where there are two."""

    first: torch.Tensor
    second: torch.Tensor | None = None
    share: torch.Tensor | None = None


def chunk_rows(vocab_size: int) -> int:
    """Rows whose logits are in memory at a time."""
    return max(1, _CHUNK_NUMBERS // vocab_size)


def head_logits(hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
    """`(n, V)` logits of `hidden (n, H)` in the head's dtype."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(lm_head.weight.dtype), lm_head.weight, lm_head.bias)


def logits_of(hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
    """`(n, V)` float32 logits of `hidden (n, H)`."""
    return head_logits(hidden, lm_head).float()


def _rows(part: slice, target: Tokens | Heads) -> Tokens | Heads:
    if isinstance(target, Tokens):
        return Tokens(target.ids[part])
    if target.second is None:
        return Heads(target.first[part])
    return Heads(target.first[part], target.second[part], target.share[part])


def loss_and_gradient(
    logits: torch.Tensor, weights: torch.Tensor, target: Tokens | Heads, lm_head: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of `logits (n, V)`, and its gradient in them times `SCALE`, in their dtype."""
    if logits.is_cuda:
        from train.softmax_gradient import softmax_gradient

        if isinstance(target, Tokens):
            loss = softmax_gradient(logits, weights, SCALE, ids=target.ids)
        else:
            first = head_logits(target.first, lm_head)
            second = None if target.second is None else head_logits(target.second, lm_head)
            loss = softmax_gradient(
                logits, weights, SCALE, first=first, second=second, share=target.share
            )
        return loss.sum(), logits
    dtype, logits = logits.dtype, logits.float()
    normaliser = logits.logsumexp(-1)
    if isinstance(target, Tokens):
        wanted = F.one_hot(target.ids, logits.shape[1]).float()
    else:
        wanted = logits_of(target.first, lm_head).softmax(-1)
        if target.second is not None:
            other = logits_of(target.second, lm_head).softmax(-1)
            wanted = torch.lerp(other, wanted, target.share[:, None])
    loss = (weights * (normaliser - (wanted * logits).sum(-1))).sum()
    excess = logits.sub_(normaliser[:, None]).exp_().sub_(wanted)
    return loss, excess.mul_(weights[:, None] * SCALE).to(dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weights, lm_head, target):  # noqa: ANN001, ANN205
        gradient = torch.empty_like(hidden)
        loss = torch.zeros((), device=hidden.device)
        rows = chunk_rows(lm_head.weight.shape[0])
        for start in range(0, len(hidden), rows):
            part = slice(start, min(start + rows, len(hidden)))
            logits = head_logits(hidden[part], lm_head)
            some, excess = loss_and_gradient(logits, weights[part], _rows(part, target), lm_head)
            loss += some
            gradient[part] = (excess @ lm_head.weight).to(gradient.dtype) / SCALE
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None


def cross_entropy(
    hidden: torch.Tensor, weights: torch.Tensor, lm_head: nn.Module, target: Tokens | Heads
) -> torch.Tensor:
    """The loss above, a scalar, of `hidden (n, H)` with `weights (n,)`."""
    with torch.autocast(hidden.device.type, enabled=False):
        return _CrossEntropy.apply(hidden.float(), weights, lm_head, target)
