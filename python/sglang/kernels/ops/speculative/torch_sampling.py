"""Sampling ops of speculative verification in torch, for hosts without a device kernel.

Same names, arguments and results as the kernels they stand for, so upstream's call sites do not
change: `top_k_renorm_probs` and `top_p_renorm_probs` (FlashInfer), `chain_speculative_sampling`
(kernels/ops/speculative/reject_sampling.py) and `tree_speculative_sampling_target_only`
(kernels/jit/include/sgl_kernel/speculative/sampling.cuh).

Two choices are ours. Ties: where the k-th largest probability occurs several times, the lowest ids
are kept and exactly k survive, as in the sampler without speculation. Empty residuals: where
rounding leaves nothing of `target - draft` after a rejection, the token is drawn from `target`; the
kernels return the last id of the vocabulary, which the target may never produce.

Cost: whatever needs the vocabulary is vectorised over the batch and touches each row once; the walk
over at most `slots` drafts runs in Python on numbers gathered before it.

References: Leviathan et al. 2023 (token-wise rejection), Sun et al. 2024, arXiv 2403.10444,
algorithm 2 (block verification).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

# Nucleus search looks at this many candidates before it sorts the whole vocabulary.
_TOP_P_CANDIDATES = 1024


def torch_on_cpu(torch_op: Callable) -> Callable[[Callable], Callable]:
    """Decorator for a kernel's entry point: CPU tensors go to `torch_op`, others to the kernel.

    The device is that of the first argument, `predicts`. `__wrapped__` is the kernel.
    """

    def decorate(kernel: Callable) -> Callable:
        @functools.wraps(kernel)
        def dispatch(predicts: torch.Tensor, *args: object, **kwargs: object) -> None:
            op = torch_op if predicts.device.type == "cpu" else kernel
            return op(predicts, *args, **kwargs)

        return dispatch

    return decorate


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Keep the `top_k` most probable ids of each row and rescale to sum 1.

    probs: (rows, vocab) float32. top_k: int or (rows,) integer, at least 1; values from the
    vocabulary size on keep the whole row. Returns (rows, vocab).
    """
    vocab = probs.shape[-1]
    top_k = torch.as_tensor(top_k, device=probs.device).reshape(-1).long().clamp(max=vocab)
    counts = top_k.expand(probs.shape[0])
    limited = counts < vocab
    if not limited.any():
        return probs / probs.sum(-1, keepdim=True)
    largest = int(counts[limited].max())
    ranked = probs.topk(largest, dim=-1).values
    pivots = ranked.gather(1, (counts.clamp(max=largest) - 1)[:, None])
    return _keep_largest(probs, counts, pivots.masked_fill(~limited[:, None], -1.0))


def top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """Keep the ids whose more probable ids sum to at most `top_p`; rescale to sum 1.

    probs: (rows, vocab) float32, rows sum to 1. top_p: float or (rows,) float, 0 to 1; the most
    probable id always stays. Returns (rows, vocab).
    """
    vocab = probs.shape[-1]
    top_p = torch.as_tensor(top_p, device=probs.device, dtype=probs.dtype).reshape(-1, 1)
    top_p = top_p.expand(probs.shape[0], 1)
    whole = top_p >= 1
    ranked = probs.topk(min(_TOP_P_CANDIDATES, vocab), dim=-1).values
    if bool(((ranked.sum(-1, keepdim=True) <= top_p) & ~whole).any()):
        ranked = probs.sort(dim=-1, descending=True).values
    before = ranked.cumsum(-1) - ranked
    kept = (before <= top_p).sum(-1, keepdim=True).clamp(min=1)
    pivots = ranked.gather(1, kept - 1).masked_fill(whole, -1.0)
    return _keep_largest(probs, kept.masked_fill(whole, vocab)[:, 0], pivots)


def _keep_largest(probs: torch.Tensor, counts: torch.Tensor, pivots: torch.Tensor) -> torch.Tensor:
    """The `counts` (rows,) largest of each row, `pivots` (rows, 1) the smallest of them."""
    above = probs > pivots
    tied = probs == pivots
    room = counts[:, None] - above.sum(-1, keepdim=True)
    if bool((tied.sum(-1, keepdim=True) > room).any()):
        tied &= tied.cumsum(-1) <= room
    kept = probs.masked_fill(~(above | tied), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """Rejection sampling along one chain a request; lossless for drafts drawn from `draft_probs`.

    Writes `predicts` (tokens,) int32 at the flat slot of each accepted draft's parent and of the
    last accepted one, `accept_index` (batch, slots) int32, the flat slots of the accepted path, and
    `accept_token_num` (batch,) int32, accepted drafts without the bonus token.

    candidates: (batch, slots) integer, column 0 the last committed token. retrive_index: (batch,
    slots), flat slots. uniform_samples: (batch, slots - 1 or more) in [0, 1), one a draft;
    uniform_samples_for_final_sampling: (batch,). target_probs: (batch, slots, vocab), row i after
    slot i. draft_probs: (batch, slots - 1 or more, vocab). The arguments after them are unused.
    """
    drafts = candidates.shape[1] - 1
    tokens = candidates[:, 1:].long()
    # p: the target's, q: the draft's probability of each draft token, (batch, drafts).
    p = target_probs[:, :drafts].gather(2, tokens[..., None])[..., 0]
    q = draft_probs[:, :drafts].gather(2, tokens[..., None])[..., 0]
    coins = uniform_samples[:, :drafts]
    possible = (q > 0) & (q <= 1)  # false for NaN
    if block_verification:
        accepted, scale = _longest_block(p, q, possible, coins, target_probs, draft_probs)
    else:
        taken = possible & (coins * q < p)
        accepted = taken.long().cumprod(1).sum(1)
        scale = torch.ones_like(p[:, 0]) if drafts else p.new_ones(p.shape[0])

    batch = torch.arange(candidates.shape[0], device=candidates.device)
    weights = target_probs[batch, accepted]
    rejected = accepted < drafts
    if bool(rejected.any()):
        draft = draft_probs[batch[rejected], accepted[rejected]]
        draft = draft.where((draft >= 0) & (draft <= 1), 0.0)
        residual = scale[rejected, None] * weights[rejected] - draft
        weights[rejected] = _residual_or(residual, weights[rejected])

    path = torch.cat((tokens, tokens.new_zeros((tokens.shape[0], 1))), dim=1)
    path[batch, accepted] = _draw(weights, uniform_samples_for_final_sampling)
    on_path = torch.arange(drafts + 1, device=accepted.device) <= accepted[:, None]
    flat = retrive_index[on_path]
    predicts[flat.long()] = path[on_path].to(predicts.dtype)
    accept_index[:, : drafts + 1][on_path] = flat.to(accept_index.dtype)
    accept_token_num.copy_(accepted)


def _longest_block(
    p: torch.Tensor,
    q: torch.Tensor,
    possible: torch.Tensor,
    coins: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification: accepted drafts (batch,) int64 and the residual's scale (batch,).

    With r_i = min(r_{i-1} p_i / q_i, 1), block i is accepted with probability s / (s + 1 - r_i),
    s = sum max(r_i target - draft, 0) over the next slot's vocabulary (r_i at the last slot).
    """
    batch, drafts = p.shape
    ratios, r = [], p.new_ones(batch)
    for i in range(drafts):
        r = torch.where(possible[:, i], (r * p[:, i] / q[:, i]).clamp(max=1.0), 0.0)
        ratios.append(r)
    accepted = torch.zeros(batch, dtype=torch.int64, device=p.device)
    scale = p.new_ones(batch)
    for block in range(drafts, 0, -1):
        r, coin = ratios[block - 1], coins[:, block - 1]
        # s / (s + 1 - r) <= r, so a coin above r needs no pass over the vocabulary.
        open_rows = ((accepted == 0) & (coin < r)).nonzero()[:, 0]
        if open_rows.numel() == 0:
            continue
        r, coin = r[open_rows], coin[open_rows]
        chance = r.clone()
        if block < drafts:
            partial = r < 1
            rows, part = open_rows[partial], r[partial]
            residual = part[:, None] * target_probs[rows, block] - draft_probs[rows, block]
            mass = residual.clamp(min=0).sum(-1)
            chance[partial] = mass / (mass + 1 - part)
        done = coin < chance
        accepted[open_rows[done]] = block
        scale[open_rows[done]] = r[done]
    return accepted, scale


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Sample along a tree by the target's probabilities alone; lossless for distinct siblings.

    At each accepted node one coin walks the children: child c is taken when the coin lies below the
    target mass of the children up to c (over `threshold_acc`), or c's own mass reaches
    `threshold_single`. Otherwise the token is drawn from the rest of the target's distribution.

    Arguments and results as `chain_speculative_sampling`, with these differences:
    retrive_next_token, retrive_next_sibling: (batch, slots), first child and next sibling of each
    slot, -1 for none. uniform_samples: (batch, slots). draft_probs: (batch, slots, vocab), zeros;
    receives the target's probability of each refused token. accept_index: (batch, depth).
    """
    batch, slots = candidates.shape
    depth = accept_index.shape[1]
    tokens = candidates.long()
    # p[b, i, j]: the target's probability, after slot i, of the token in slot j.
    p = target_probs.gather(2, tokens[:, None, :].expand(batch, slots, slots)).tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins, ids = uniform_samples.tolist(), tokens.tolist()

    # (request, slot, token) of every refused draft; the accepted slots of each request.
    refused: list[tuple[int, int, int]] = []
    paths: list[list[int]] = []
    for b in range(batch):
        path = [0]
        while len(path) < depth:
            node, mass = path[-1], 0.0
            child = first_child[b][node]
            while child != -1:
                chance = p[b][node][child]
                mass += chance
                below = coins[b][node] < mass / threshold_acc
                if chance > 0 and (below or chance >= threshold_single):
                    break
                refused.append((b, node, ids[b][child]))
                child = next_sibling[b][child]
            if child == -1:
                break
            path.append(child)
        paths.append(path)

    device = candidates.device
    if refused:
        where = torch.tensor(refused, device=device).unbind(1)
        draft_probs[where] = target_probs[where]
    rows = torch.arange(batch, device=device)
    last = torch.tensor([path[-1] for path in paths], device=device)
    weights = target_probs[rows, last]
    weights = _residual_or(weights - draft_probs[rows, last], weights)
    final = _draw(weights, uniform_samples_for_final_sampling)

    lengths = torch.tensor([len(path) for path in paths], device=device)
    padded = torch.tensor([path + [0] * (depth - len(path)) for path in paths], device=device)
    following = tokens.gather(1, padded).roll(-1, dims=1)
    following[rows, lengths - 1] = final
    on_path = torch.arange(depth, device=device) < lengths[:, None]
    flat = retrive_index.gather(1, padded)[on_path]
    predicts[flat.long()] = following[on_path].to(predicts.dtype)
    accept_index[on_path] = flat.to(accept_index.dtype)
    accept_token_num.copy_(lengths - 1)


def _residual_or(residual: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """max(residual, 0), or `otherwise` in rows where that is zero everywhere; (rows, vocab)."""
    residual = residual.clamp(min=0)
    empty = residual.sum(-1, keepdim=True) <= 0
    return torch.where(empty, otherwise, residual)


def _draw(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw of each row: the first id whose cumulated weight exceeds coin * total.

    weights: (rows, vocab) of any scale, coins: (rows,) in [0, 1). Never an id of weight 0.
    """
    cdf = weights.double().cumsum(-1)
    level = coins.double()[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, level, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
