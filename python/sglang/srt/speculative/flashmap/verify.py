"""Accept rules: which drafts the target keeps, and the token it adds.

Every rule is lossless. On a tree of any shape, with the target's choice drawn before it is looked
at whether somebody drafted it:

* Walk: the target chooses a token after every node; from the root, go to the child that holds the
  chosen token until there is none, whose place the chosen token takes. Greedy requests choose the
  argmax. Sampled ones choose by the Gumbel-max trick (``match``): the token with the largest
  ``log p(x) + g(x)``, the noise ``g`` keyed by the request's seed and the position of the new
  token. The token committed at a position is then that function of seed, position and the target's
  distribution there: drafts decide how many tokens a step commits, never which, and a seeded text
  is the same whatever was drafted. Nodes of one depth share their noise, but a path has one of
  them; and what is drawn past the end of a path is never looked at, so that the next step may draw
  at those positions again. The first token (``first_token.py``) is drawn by the same numbers.

On a chain, ``x_1 … x_γ`` are the drafts, ``p_i`` the target's distribution after the
anchor and ``x_1 … x_{i-1}``, ``q_i`` the draft's distribution of slot ``i`` given its noise (an
exact proposal: given the noise the slots are independent draws from ``q_i``):

* Token-wise rejection (Leviathan et al. 2023, Chen et al. 2023): keep ``x_i`` while
  ``u_i q_i(x_i) < p_i(x_i)``, ``u_i`` uniform; at the first failure sample from
  ``max(p_i - q_i, 0)``, after all ``γ`` from ``p_{γ+1}``.
* Block verification (Sun et al. 2024, arXiv:2403.10444): with ``r_0 = 1``,
  ``r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i))`` and
  ``m_i = Σ_x max(r_i p_{i+1}(x) - q_{i+1}(x), 0)``, keep the longest prefix ``i`` with
  ``u_i < h_i = m_i / (m_i + 1 - r_i)`` (``h_γ = r_γ``); sample from
  ``max(r_i p_{i+1} - q_{i+1}, 0)``, after all from ``p_{γ+1}``. Never accepts fewer tokens.

On a tree whose nodes are draws: the children of a node at depth ``i`` are the first of slot
``i``'s draws without replacement, in that order (``slot_draws``). From the root on, each child is a
chance (recursive rejection sampling, Jeon et al. 2024, arXiv:2402.14160): it is kept by the
token-wise rule with what is left of ``p`` and of ``q``; if not, ``p`` goes on as ``max(p - q, 0)``,
normalised, and ``q`` as ``q`` without that token. Where no child is kept, what is left of ``p`` is
sampled from. All nodes of a depth may share a list, since a path looks at a slot once; and which
nodes there are may depend on the context, never on the lists (``plan.draw_weights``).

Rejection needs drafts that are draws from a known ``q``. Nodes of a tree that is cut by votes are
not, and no ``q`` makes up for it: two rules that look alike, one of them biased.

``q`` lives on the draft vocabulary. Only the one row per request that is resampled is widened to
the whole vocabulary; a greedy batch computes no distribution at all. No step waits for the device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from sglang.kernels.ops.speculative.flashmap.greedy import accept_chain
from sglang.kernels.ops.speculative.flashmap.noise import uniform_noise
from sglang.kernels.ops.speculative.flashmap.sampler import sample_draft
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan
from sglang.kernels.ops.speculative.flashmap.tree_rejection import reject_tree
from sglang.kernels.ops.speculative.flashmap.tree_walk import walk_tree
from sglang.srt.speculative.flashmap.noise import ROWS_PER_ANCHOR, Stream
from sglang.srt.speculative.flashmap.target_probs import (
    is_filtered,
    row_temperatures,
    target_probs,
)


@dataclass(frozen=True)
class Proposal:
    """The draft's side of sampled verification."""

    probs: torch.Tensor
    """``q (B, γ, Vd)`` float32, at the temperatures drafts were drawn at."""
    ids: torch.Tensor | None
    """Token ids ``(Vd,)`` of the columns; None: the whole vocabulary."""
    column_of: torch.Tensor | None = None
    """Its inverse ``(V,)``."""

    def of(self, drafts: torch.Tensor) -> torch.Tensor:
        """``q_i(x_i) (B, γ)`` of ``drafts (B, γ)``."""
        columns = drafts if self.column_of is None else self.column_of[drafts].to(torch.int64)
        return self.probs.gather(2, columns[..., None])[..., 0]


@dataclass(frozen=True)
class StepEnd:
    """Where a step leaves ``B`` requests."""

    bonus: torch.Tensor
    """``Accepted.bonus``."""
    commit_lens: torch.Tensor
    """Committed positions, the anchor's included, ``(B,)`` int32."""
    seq_lens: torch.Tensor
    """Committed positions in all ``(B,)`` int64: the next anchor's position."""
    relayed: bool = False
    """Whether the next step's tables have it already."""


@dataclass(frozen=True)
class Accepted:
    """Outcome of one verify step of ``B`` requests."""

    num_correct: torch.Tensor
    """Kept drafts ``(B,)`` int64, 0 … γ."""
    tokens: torch.Tensor
    """Committed tokens ``(B, γ + 1)`` int64: kept drafts, then the target's own; the rest is not
    committed."""
    path: torch.Tensor | None = None
    """Rows of the verify window that were kept ``(B, γ + 1)`` int32: the anchor's, then the
    drafts', -1 after the end. None: rows ``0 … num_correct``."""
    known_end: StepEnd | None = None
    """Of a kernel that wrote it beside the rest."""

    @property
    def bonus(self) -> torch.Tensor:
        """The target's own token after the drafts ``(B,)`` int64; the next anchor."""
        if self.known_end is not None:
            return self.known_end.bonus
        return self.tokens.gather(1, self.num_correct[:, None])[:, 0]

    def end(self, seq_lens: torch.Tensor) -> StepEnd:
        """Where requests of ``seq_lens (B,)``, the anchors' positions, are left."""
        if self.known_end is not None:
            return self.known_end
        commit_lens = torch.empty_like(self.num_correct, dtype=torch.int32)
        torch.add(self.num_correct, 1, out=commit_lens)
        return StepEnd(self.bonus, commit_lens, seq_lens + commit_lens)

    @classmethod
    def of_chain(
        cls, drafts: torch.Tensor, num_correct: torch.Tensor, bonus: torch.Tensor
    ) -> "Accepted":
        """The first ``num_correct (B,)`` of ``drafts (B, γ)``, then ``bonus (B,)``."""
        columns = torch.arange(drafts.shape[1] + 1, device=drafts.device)
        padded = torch.cat([drafts, bonus[:, None]], dim=1)
        kept = columns < num_correct[:, None]
        return cls(num_correct, torch.where(kept, padded, bonus[:, None]))

    def with_path(self) -> "Accepted":
        """The same with ``path`` set."""
        if self.path is not None:
            return self
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device, dtype=torch.int32)
        path = torch.where(columns <= self.num_correct[:, None], columns, -1)
        return Accepted(self.num_correct, self.tokens, path)


def accept_greedy(
    block: torch.Tensor,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    relay: list[torch.Tensor] | None = None,
    simulated: int = 0,
) -> Accepted:
    """The greedy rule on chains.

    Args:
        block: anchors and drafts ``(B, W)``.
        chosen: the target's argmax after each row: keys ``(B, W, S)`` of ``argmax_keys``, or tokens
            ``(B, W)``.
        seq_lens: the anchors' positions ``(B,)`` int64.
        relay, simulated: as of ``accept_chain``; ``relay`` for an outcome that is final.
    """
    tokens, num_correct, *end = accept_chain(block, chosen, seq_lens, relay, simulated)
    # Up to the first mismatch the argmax is the draft.
    return Accepted(num_correct, tokens, known_end=StepEnd(*end, relay is not None))


def accept_walk(
    tree: TreePlan,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    num_drafts: int,
    relay: list[torch.Tensor] | None = None,
) -> Accepted:
    """The walk along ``chosen``, the target's token after each node, ``γ`` drafts at most; for the
    other arguments see ``accept_greedy``."""
    path, num_correct, tokens, *end = walk_tree(
        tree.tokens, tree.first_child, tree.next_sibling, chosen, seq_lens, num_drafts + 1, relay
    )
    return Accepted(num_correct, tokens, path, StepEnd(*end, relay is not None))


def draw_nodes(
    logits: torch.Tensor,
    sampling_info,
    *,
    depths: torch.Tensor,
    seeds: torch.Tensor,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """The target's draw after each node of ``B`` trees, ``(B, W)`` int64.

    Args:
        logits: ``(B · W, V)``, adjusted.
        sampling_info: the batch's ``SamplingBatchInfo``.
        depths: ``(B, W)`` integers; the token after a node comes ``depth + 1`` after the anchor.
        seeds: request seeds ``(B,)``; anchors: anchor positions ``(B,)``, both int64.
    """
    width = depths.shape[1]
    if is_filtered(sampling_info):
        scores = target_probs(logits, sampling_info, width).flatten(0, 1).log_()
        temperatures = torch.ones_like(scores[:, 0])
    else:
        # The draw needs no normalised distribution.
        scores, temperatures = logits, row_temperatures(sampling_info).repeat_interleave(width)
    chosen = sample_draft(
        scores,
        None,
        temperatures,
        seeds.repeat_interleave(width),
        ((anchors[:, None] + depths) * ROWS_PER_ANCHOR).view(-1),
        Stream.TARGET_TOKEN.value,
    )
    return chosen.view(-1, width)


def propose(
    draft_logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    ids: torch.Tensor | None,
    column_of: torch.Tensor | None,
) -> Proposal:
    """The proposal of drafts sampled at ``temperatures``.

    Args:
        draft_logits: ``(B, γ, Vd)``.
        temperatures: ``(B,)``; a row at 0 (greedy: its proposal is not used) is taken at 1.
        ids, column_of: the draft vocabulary ``(Vd,)`` and its inverse ``(V,)``, or None.
    """
    heat = torch.where(temperatures > 0, temperatures, 1.0)
    probs = torch.softmax(draft_logits.float() / heat[:, None, None], dim=-1)
    return Proposal(probs, ids, column_of)


def accept_rejection(
    drafts: torch.Tensor,
    target: torch.Tensor,
    proposal: Proposal,
    *,
    seeds: torch.Tensor,
    anchors: torch.Tensor,
    block_verification: bool,
) -> Accepted:
    """Token-wise or block-wise rejection.

    Args:
        drafts: ``(B, γ)``; target: ``p (B, γ + 1, V)`` float32; proposal: ``q``.
        seeds: request seeds ``(B,)``; anchors: anchor positions ``(B,)``, both int64.
        block_verification: block-wise instead of token-wise.
    """
    num_drafts = drafts.shape[1]
    offsets = anchors * ROWS_PER_ANCHOR
    coins = uniform_noise(seeds, offsets, num_drafts, Stream.ACCEPT_COIN.value)
    p = target[:, :-1].gather(2, drafts[..., None])[..., 0]
    q = proposal.of(drafts)
    if block_verification:
        num_correct, scale = _longest_block(coins, p, q, target, proposal)
    else:
        num_correct = (coins * q < p).to(torch.int64).cumprod(dim=1).sum(dim=1)
        scale = torch.ones_like(p[:, 0])
    kept = num_correct == num_drafts  # all: there is no rejected slot
    weights = _residual(
        _row(target, num_correct),
        proposal,
        num_correct.clamp_max(num_drafts - 1),
        torch.where(kept, 1.0, scale),
        torch.where(kept, 0.0, 1.0),
    )
    bonus = draw_target(weights, seeds=seeds, anchors=anchors)
    return Accepted.of_chain(drafts, num_correct, bonus)


def accept_drawn_tree(
    tree: TreePlan,
    target: torch.Tensor,
    proposal: Proposal,
    *,
    seeds: torch.Tensor,
    anchors: torch.Tensor,
) -> Accepted:
    """Rejection along trees whose nodes are draws without replacement.

    Args:
        tree: of ``B`` requests; a request whose tree is another has an outcome of no meaning.
        target: ``p (B, W, V)`` float32 after each node; proposal: ``q``.
        seeds: request seeds ``(B,)``; anchors: anchor positions ``(B,)``, both int64.
    """
    width, num_drafts = tree.tokens.shape[1], proposal.probs.shape[1]
    offsets = anchors * ROWS_PER_ANCHOR
    path, num_correct, taken = reject_tree(
        tree.tokens,
        tree.first_child,
        tree.next_sibling,
        target,
        proposal.probs,
        proposal.ids,
        proposal.column_of,
        uniform_noise(seeds, offsets, width, Stream.ACCEPT_COIN.value),
        num_drafts + 1,
    )
    nodes = path.clamp_min(0).to(torch.int64)
    last = nodes.gather(1, num_correct[:, None])[:, 0]
    slot = num_correct.clamp_max(num_drafts - 1)
    weights = _residual(_row(target, last), proposal, slot, torch.ones_like(taken), taken)
    bonus = draw_target(weights, seeds=seeds, anchors=anchors)
    drafts = tree.tokens.gather(1, nodes[:, 1:])
    return dataclasses.replace(Accepted.of_chain(drafts, num_correct, bonus), path=path)


def draw_target(
    weights: torch.Tensor, *, seeds: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """One token ``(B,)`` int64 a row of ``weights (B, V)``, unnormalised; the seeds' own draw."""
    return sample_draft(
        weights.log(),
        None,
        torch.ones_like(weights[:, 0]),
        seeds,
        anchors * ROWS_PER_ANCHOR,
        Stream.TARGET_TOKEN.value,
    )


def _row(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row ``index[b]`` of ``values[b]``: ``(B, n, V) -> (B, V)``."""
    return values[torch.arange(values.shape[0], device=values.device), index]


def _residual(
    p: torch.Tensor,
    proposal: Proposal,
    slot: torch.Tensor,
    scale: torch.Tensor,
    taken: torch.Tensor,
) -> torch.Tensor:
    """``max(scale p - taken q, 0) (B, V)`` of ``p (B, V)`` and ``q`` of each row's ``slot (B,)``,
    unnormalised; ``p`` where nothing is left, as ``p`` and ``q`` agree up to rounding."""
    q = _row(proposal.probs, slot)
    if proposal.ids is not None:
        q = torch.zeros_like(p).index_copy_(1, proposal.ids, q)
    residual = (scale[:, None] * p - taken[:, None] * q).clamp_min(0)
    return torch.where((residual.sum(dim=1) <= 0)[:, None], p, residual)


def _longest_block(
    coins: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    target: torch.Tensor,
    proposal: Proposal,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification: kept drafts ``(B,)`` and the residual's factor ``r (B,)``."""
    num_drafts = p.shape[1]
    ratio = torch.ones_like(p[:, 0])
    ratios = []
    for i in range(num_drafts):  # r_i, sequential by definition
        ratio = (ratio * p[:, i] / q[:, i]).clamp_max(1.0)
        ratios.append(ratio)
    r = torch.stack(ratios, dim=1)
    accept = r.clone()
    for i in range(num_drafts - 1):  # slot by slot: bounds the (B, Vd) scratch
        next_p = target[:, i + 1]
        outside = 0.0
        if proposal.ids is not None:
            inside = next_p[:, proposal.ids]
            outside = (next_p.sum(dim=1) - inside.sum(dim=1)).clamp_min(0) * r[:, i]
            next_p = inside
        excess = (r[:, i, None] * next_p - proposal.probs[:, i + 1]).clamp_min(0).sum(dim=1)
        mass = excess + outside
        # r = 1 needs no coin; it also makes the quotient 0/0 where p and q agree.
        accept[:, i] = torch.where(r[:, i] < 1, mass / (mass + 1 - r[:, i]), r[:, i])
    index = torch.arange(1, num_drafts + 1, device=p.device)
    num_correct = ((coins < accept) * index).amax(dim=1)
    padded = torch.cat([torch.ones_like(r[:, :1]), r], dim=1)
    return num_correct, padded.gather(1, num_correct[:, None])[:, 0]


def merge_accepted(walked: Accepted, rejected: Accepted, rejected_rows: torch.Tensor) -> Accepted:
    """Per-row choice between two outcomes; ``rejected_rows (B,)`` bool."""
    rows = rejected_rows[:, None]
    if walked.path is not None:
        rejected = rejected.with_path()
    return Accepted(
        torch.where(rejected_rows, rejected.num_correct, walked.num_correct),
        torch.where(rows, rejected.tokens, walked.tokens),
        None if walked.path is None else torch.where(rows, rejected.path, walked.path),
    )
