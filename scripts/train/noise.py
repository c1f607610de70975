"""The state of a block as the draft reads it, exactly.

The draft reads a state `x (…, V)` twice: linearly, `x @ E`, and as the posterior over clean tokens
it implies, `softmax(x s/(1-s)²) @ E`.

1. `s = 0`: the posterior is uniform, a constant; `x0 @ E ~ N(0, EᵀE)`, so `z @ Fᵀ` with
   `z ~ N(0, I_H)`, `F Fᵀ = EᵀE`, has its law. One-jump training needs no V-wide noise at all.
2. `s > 0`: `x_s = (1-s) x0 + s onehot(y)` is drawn whole. A block of K slots costs K·V normal
   draws, one softmax and two `(K, V) @ (V, H)` products: about what its logits cost. It is done
   `_CHUNK` rows at a time under no_grad, so memory is `_CHUNK · V` floats however large the batch.
"""

from __future__ import annotations

import torch

_CHUNK = 4096
_MIN_REMAINING_TIME = 1e-3
"""Clamp of `1 - s` in the posterior's scale, as served."""


@torch.no_grad()
def noise_factor(embedding: torch.Tensor) -> torch.Tensor:
    """`F (H, H)` float32 with `F Fᵀ = EᵀE` of `embedding (V, H)`; computed in float64.

    Cholesky, or the symmetric square root where `EᵀE` is singular.
    """
    gram = sum(rows.T @ rows for rows in (part.double() for part in embedding.split(8192)))
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) or not bool(torch.isfinite(factor).all()):
        values, vectors = torch.linalg.eigh(gram)
        factor = vectors * values.clamp_min(0).sqrt()
    return factor.float()


def noise_embedding(
    shape: tuple[int, ...], factor: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """`x0 @ E (*shape, H)` of fresh noise, float32."""
    z = torch.randn(*shape, factor.shape[0], generator=generator, device=factor.device)
    return z @ factor.T


@torch.no_grad()
def uniform_posterior(embedding: torch.Tensor) -> torch.Tensor:
    """`(H,)`: the posterior term of every state at `s = 0`, before its norm."""
    vocab = embedding.shape[0]
    uniform = torch.full((1, vocab), 1.0 / vocab, device=embedding.device)
    return (uniform.to(embedding.dtype) @ embedding)[0]


@torch.no_grad()
def noised(tokens: torch.Tensor, times: torch.Tensor, vocab: int, generator: torch.Generator):
    """`x_s (n, V)` float32 of clean `tokens (n,)` at `times (n,)`."""
    state = torch.randn(len(tokens), vocab, generator=generator, device=tokens.device)
    state *= (1.0 - times)[:, None]
    return state.scatter_add_(1, tokens[:, None], times[:, None])


@torch.no_grad()
def read_state(
    state: torch.Tensor, times: torch.Tensor, embedding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Posterior and linear terms, each `(n, H)` float32, of `state (n, V)` at `times (n,)`."""
    scale = times / (1.0 - times).clamp_min(_MIN_REMAINING_TIME).square()
    posterior = (state * scale[:, None]).softmax(-1)
    dtype = embedding.dtype
    return (posterior.to(dtype) @ embedding).float(), (state.to(dtype) @ embedding).float()


def noised_embedding(
    tokens: torch.Tensor, times: torch.Tensor, embedding: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`read_state` of freshly noised `tokens (n,)` at `times (n,)`, chunk by chunk."""
    parts = [
        read_state(noised(some, at, embedding.shape[0], generator), at, embedding)
        for some, at in zip(tokens.split(_CHUNK), times.split(_CHUNK))
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
