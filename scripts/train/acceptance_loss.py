"""What rejection sampling would keep of a draft, and losses on it.

Notation: `y` the text that the target wrote; for slot k of a block, `p_k` the target's distribution
after the true tokens before it, `x_k` the draft's logits and `q_k` their softmax. Both at T = 1.

    a_k = Σ_v min(p_k(v), q_k(v))       probability that a draft of slot k is kept
    r_k = min(1, q_k(y_k) / p_k(y_k))   of a draft kept, how likely it is y_k against the text
    E   = Σ_k (Π_{j<k} r_j) a_k         drafts kept in a block

`a_k` is 1 minus the total variation of p_k and q_k (Leviathan et al., arXiv:2211.17192; trained on
by DistillSpec, arXiv:2310.08461). It holds for the prefix at hand, and prefixes that rejection
keeps are not the text's: a kept token has the distribution min(p, q) / a. So `Π a_j` is biased,
and `E` is not: for text sampled at T = 1

    P(k drafts kept) = Σ_y Π_{j<=k} min(p_j, q_j)(y_j) = E_{y ~ p} [(Π_{j<k} r_j) a_k].

Two losses, a mean over blocks or weighted over slots:

    log      Σ_k w_k (-log a_k)         negative log-acceptance of LK losses, arXiv:2602.23881:
                                        its gradient does not vanish where a_k is small, as that of
                                        1 - a_k does
    length   -log(1 + E)                the tokens of a target pass itself. A slot counts as often
                                        as it is reached, and is fitted to the tokens before it
                                        that are kept. The log: passes fall where little is kept,
                                        so that saved passes, not kept tokens, are what counts.

A loss is any function of the rows' `Terms`; autograd gives its derivatives in them, three numbers a
row, and the gradient of the logits is

    ∂CE = q - p,   ∂a = q (1[q < p] - b),  b = Σ_{v: q < p} q(v),   ∂log(q(y)/p(y)) = 1[v = y] - q.

It is formed in the forward as in `vocabulary_loss.py`, a chunk of whole blocks at a time. On a GPU
two kernels (`acceptance_gradient.py`) read a row's logits and the target's three times each and
write once, where cross-entropy alone reads them twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from train.vocabulary_loss import SCALE, chunk_rows, head_logits

LOSSES = ("log", "length")
_LEAST = 1e-9
"""Under a probability whose logarithm is taken."""


@dataclass(frozen=True)
class Terms:
    """Of each row, `(n,)` float32."""

    cross_entropy: torch.Tensor
    """`CE(p, q)`."""
    overlap: torch.Tensor
    """`a`."""
    log_ratio: torch.Tensor
    """`log(q(y) / p(y))`."""


@dataclass(frozen=True)
class Statistics:
    """`Terms`, and what the gradient reads besides them, `(n,)` float32 each."""

    terms: Terms
    normaliser: torch.Tensor
    """`logsumexp` of the logits."""
    known_normaliser: torch.Tensor
    """Of the target's logits."""
    below: torch.Tensor
    """`b`."""


def statistics(logits: torch.Tensor, known: torch.Tensor, ids: torch.Tensor) -> Statistics:
    """Of the draft's `logits (n, V)`, the target's `known (n, V)` and the text `ids (n,)` int64."""
    if logits.is_cuda:
        from train.acceptance_gradient import acceptance_statistics

        cross_entropy, overlap, log_ratio, *rest = acceptance_statistics(logits, known, ids)
        return Statistics(Terms(cross_entropy, overlap, log_ratio), *rest)
    logits, known = logits.float(), known.float()
    normaliser, known_normaliser = logits.logsumexp(-1), known.logsumexp(-1)
    log_q, log_p = logits - normaliser[:, None], known - known_normaliser[:, None]
    q, p = log_q.exp(), log_p.exp()
    at = ids[:, None]
    terms = Terms(
        -(p * log_q).sum(-1),
        torch.minimum(p, q).sum(-1),
        (log_q.gather(1, at) - log_p.gather(1, at))[:, 0],
    )
    below = torch.where(q < p, q, 0.0).sum(-1)
    return Statistics(terms, normaliser, known_normaliser, below)


def gradient(
    logits: torch.Tensor, known: torch.Tensor, ids: torch.Tensor, found: Statistics, by: Terms
) -> torch.Tensor:
    """The gradient in `logits` times `SCALE`, in their dtype, of a loss whose derivatives in the
    terms are `by`; may take the place of `logits`."""
    if logits.is_cuda:
        from train.acceptance_gradient import acceptance_gradient

        return acceptance_gradient(
            logits,
            known,
            ids,
            (found.normaliser, found.known_normaliser, found.below),
            (by.cross_entropy, by.overlap, by.log_ratio),
            SCALE,
        )
    q = (logits.float() - found.normaliser[:, None]).exp_()
    p = (known.float() - found.known_normaliser[:, None]).exp_()
    onehot = torch.nn.functional.one_hot(ids, logits.shape[1])
    out = by.cross_entropy[:, None] * (q - p)
    out += by.overlap[:, None] * q * ((q < p).float() - found.below[:, None])
    out += by.log_ratio[:, None] * (onehot - q)
    return out.mul_(SCALE).to(logits.dtype)


class _TermsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, known, ids, block, value):  # noqa: ANN001, ANN205
        slope = torch.empty_like(hidden)
        loss = torch.zeros((), device=hidden.device)
        rows = max(1, chunk_rows(lm_head.weight.shape[0]) // block) * block
        for start in range(0, len(hidden), rows):
            part = slice(start, min(start + rows, len(hidden)))
            logits = head_logits(hidden[part], lm_head)
            targets = head_logits(known[part], lm_head)
            found = statistics(logits, targets, ids[part])
            with torch.enable_grad():
                fields = vars(found.terms).items()
                terms = Terms(**{key: row.detach().requires_grad_() for key, row in fields})
                some = value(terms, part)
                by = torch.autograd.grad(some, list(vars(terms).values()), materialize_grads=True)
            loss += some.detach()
            excess = gradient(logits, targets, ids[part], found, Terms(*by))
            slope[part] = (excess @ lm_head.weight).to(slope.dtype) / SCALE
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        (slope,) = ctx.saved_tensors
        return slope * upstream.to(slope.dtype), None, None, None, None, None


def terms_loss(
    hidden: torch.Tensor,
    lm_head: nn.Module,
    known: torch.Tensor,
    ids: torch.Tensor,
    block: int,
    value: Callable[[Terms, slice], torch.Tensor],
) -> torch.Tensor:
    """The sum of `value(terms, rows)` over chunks of whole blocks, a scalar.

    `hidden (n, H)` is the draft's, `known (n, H)` the target's, both read by `lm_head`; `ids (n,)`
    int64 is the text; n a multiple of `block`.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return _TermsLoss.apply(hidden.float(), lm_head, known, ids, block, value)


def kept(terms: Terms, labelled: torch.Tensor) -> torch.Tensor:
    """`(Π_{j<k} r_j) a_k` of whole blocks: `(blocks, K)` for `terms` of their rows in turn and
    `labelled (blocks, K)`; 0 from a block's first slot without a label on."""
    ratio = terms.log_ratio.clamp_max(0.0).exp().view(labelled.shape)
    reached = (ratio * labelled).cumprod(-1)
    reached = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], dim=-1)
    return reached * terms.overlap.view(labelled.shape) * labelled


def acceptance_value(
    kind: str, share: float, weights: torch.Tensor, labelled: torch.Tensor
) -> Callable[[Terms, slice], torch.Tensor]:
    """`(1 - share) Σ w CE + share · L`, `L` the loss `kind`, for `terms_loss`.

    `weights (n,)` sum to 1, `labelled (blocks, K)` tells which slots have a label; every block has
    one.
    """
    blocks, size = labelled.shape

    def value(terms: Terms, part: slice) -> torch.Tensor:
        some = weights[part]
        if kind == "log":
            lost = -(some * terms.overlap.clamp_min(_LEAST).log()).sum()
        else:
            whole = slice(part.start // size, part.stop // size)
            lost = -kept(terms, labelled[whole]).sum(-1).log1p().sum() / blocks
        return (1.0 - share) * (some * terms.cross_entropy).sum() + share * lost

    return value
