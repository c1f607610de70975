"""What a step verifies, and by which rule: decided per request, never per batch.

A server of chains (``--speculative-flashmap-tree-candidates`` 0, or 1 without choices) keeps the
greedy prefix of a greedy request and rejects drafts of a sampled one. A server of trees verifies
every request in the same graph, a chain being a tree without branches:

| request | tree or chain | rule |
|---|---|---|
| greedy | tree | walk along the target's argmax |
| sampled, ``T <=`` threshold | tree | walk along the target's own draws (``match``) |
| sampled, ``T >`` threshold | chain: candidate 0 | token- or block-wise rejection |
| the same where trees grow from choices | tree of draws | rejection without replacement |

What the last row draws decides no node of its tree (``draw_weights``), which keeps its rule exact;
``--speculative-use-block-verification`` asks for chains there. The rule depends on the request
alone, so that a seeded request is answered the same in any batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.penalties import to_device
from sglang.srt.speculative.spec_utils import GrammarTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_params import SamplingParams

RULES = ("greedy", "match", "rejection")
# Profiles of how much a slot's draws are worth.
_LEVELS = 16


def request_rule(params: "SamplingParams", serve: FlashMapServeConfig) -> str:
    """Which of ``RULES`` a request of ``params`` is verified by."""
    if params.top_k <= 1:  # what upstream makes of temperature 0
        return "greedy"
    return "rejection" if serve.rejects(params.temperature) else "match"


@dataclass(frozen=True)
class StepRules:
    """The accept rules of a batch of ``B`` requests."""

    greedy: int
    """How many requests are greedy; the same for the others. Known on the host, so that a step
    launches only what its batch needs."""
    match: int
    rejection: int
    rejected: torch.Tensor | None
    """Requests under rejection ``(B,)`` bool; None unless some are and some are not."""

    @classmethod
    def of(cls, batch: "ScheduleBatch", serve: FlashMapServeConfig) -> "StepRules":
        info = batch.sampling_info
        if info is None or info.is_all_greedy:
            return cls(greedy=len(batch.reqs), match=0, rejection=0, rejected=None)
        rules = [request_rule(req.sampling_params, serve) for req in batch.reqs]
        counts = {rule: rules.count(rule) for rule in RULES}
        rejected = None
        if 0 < counts["rejection"] < len(rules):
            flags = [rule == "rejection" for rule in rules]
            rejected = to_device(flags, torch.bool, batch.seq_lens.device)
        return cls(**counts, rejected=rejected)

    def under_rejection(self, size: int, device: torch.device) -> torch.Tensor:
        """Requests that are verified by rejection, ``(B,)`` bool."""
        if self.rejected is not None:
            return self.rejected
        return same_flags(self.rejection > 0, size, device)


@functools.cache
def same_flags(value: bool, size: int, device: torch.device) -> torch.Tensor:
    """``(size,)`` bool, kept for good."""
    return torch.full((size,), value, device=device)


@functools.cache
def draw_weights(count: int, device: torch.device) -> torch.Tensor:
    """How likely draw ``r`` of a slot is the one accepted, ``(_LEVELS, count)`` float32 by the
    likelihood ``t`` of the slot's likeliest token, kept for good: what trees of draws grow by, so
    that their nodes depend on the draft's distributions but on nothing that was drawn.

    Of the first draws ``0.2 + 0.7 t`` are accepted, and ``(0.4 + 0.4 t) / (r + 1)`` of the
    ``r``-th (from 1 on) that is reached. Measured of the demo target's draft at temperatures 1, 0.7
    and 0.4 (docs/benchmarks.md): at ``t`` near 0.1, 0.5 and 0.95 0.28, 0.52 and 0.84 of the
    first draws at 1, likewise 0.2, 0.36 and 0.82 at 0.7; 0.1 to 0.2 of second ones below 0.5 and
    0.2 to 0.4 above.
    """
    likelihood = (torch.arange(_LEVELS, dtype=torch.float64)[:, None] + 0.5) / _LEVELS
    rank = torch.arange(count, dtype=torch.float64)
    accepted = (0.4 + 0.4 * likelihood) / (rank + 1)
    accepted[:, :1] = 0.2 + 0.7 * likelihood
    reached = (1 - accepted).cumprod(1).roll(1, 1)
    reached[:, 0] = 1
    return (reached * accepted).float().to(device)


@dataclass(frozen=True)
class VerifyBlock:
    """The rows of a verify forward: ``W`` tokens a request, the anchor first."""

    tokens: torch.Tensor
    """``(B, W)`` int64."""
    path: torch.Tensor
    """``(B, W, W)`` bool: the tokens that each row comes after, its own included."""
    tree: TreePlan | None
    """None on a server of chains: row ``j`` comes after rows ``0 … j``."""

    @classmethod
    def chain(cls, tokens: torch.Tensor, path: torch.Tensor) -> "VerifyBlock":
        """Anchors and drafts ``tokens (B, W)``, and the lower triangle ``path (W, W)``."""
        return cls(tokens, path.expand(len(tokens), -1, -1), None)

    @classmethod
    def of_tree(cls, tree: TreePlan) -> "VerifyBlock":
        return cls(tree.tokens, tree.mask, tree)

    def grammar_tree(self) -> GrammarTree:
        """What grammar masks are built over, on its way to the host."""
        if self.tree is None:
            return GrammarTree.from_linear_chain(self.tokens)
        return GrammarTree.from_device(
            self.tree.first_child, self.tree.next_sibling, self.tree.tokens
        )


def first_requests(tree: TreePlan, size: int) -> TreePlan:
    """Views of the trees of the first ``size`` requests."""
    return TreePlan(*(tensor[:size] for tensor in tree.tensors()))
