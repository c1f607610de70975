"""A toy target and draft small enough that every outcome of a verify step can be enumerated."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import pi, prod

import torch
from sglang.kernels.ops.speculative.flashmap.sampler import sample_draft
from sglang.srt.speculative.flashmap.noise import Stream, row_offsets
from sglang.srt.speculative.flashmap.verify import Accepted, accept_rejection, propose

VOCAB = 5


@dataclass(frozen=True)
class Estimate:
    """Mean and mean square over `draws` rows of the probability of each cell (a whole text), beside
    the target's `expected` probability; all `(V,) * (γ + 1)`."""

    mean: torch.Tensor
    square: torch.Tensor
    expected: torch.Tensor
    draws: int

    @property
    def standard_error(self) -> torch.Tensor:
        # Cells too rare for an estimate: a probability of mean P has a variance of at most P.
        frequent = self.draws * self.expected > 100
        variance = torch.where(frequent, self.square - self.mean**2, self.expected)
        return (variance.clamp_min(1e-18) / self.draws).sqrt()

    @property
    def total_variation(self) -> float:
        return float((self.mean - self.expected).abs().sum() / 2)

    @property
    def expected_total_variation(self) -> float:
        """Of a lossless rule: a normal deviation is `sqrt(2 / π)` standard errors on average."""
        return float(self.standard_error.sum() * (2 / pi) ** 0.5 / 2)

    @property
    def worst_cell(self) -> float:
        """The largest deviation in standard errors, over cells expected at least 10 times."""
        seen = self.draws * self.expected >= 10
        return float(((self.mean - self.expected).abs() / self.standard_error)[seen].max())


@dataclass(frozen=True)
class ToyChain:
    """`target[i]` of shape `(V,) * (i + 1)` holds `p(x_{i+1} | x_1 … x_i)`, for `i = 0 … γ`;
    `draft (γ, Vd)` holds `q_i` on the draft vocabulary `ids`, or on all tokens when None."""

    target: list[torch.Tensor]
    draft: torch.Tensor
    ids: torch.Tensor | None = None
    temperature: float = 1.0

    @property
    def num_drafts(self) -> int:
        return self.draft.shape[0]

    def wide_draft(self) -> torch.Tensor:
        """`q (γ, V)` float64, 0 outside the draft vocabulary."""
        wide = torch.zeros(self.num_drafts, VOCAB, dtype=torch.float64)
        wide[:, slice(None) if self.ids is None else self.ids] = self.draft.double()
        return wide

    def joint(self) -> torch.Tensor:
        """The target's distribution of `γ + 1` tokens, `(V,) * (γ + 1)`."""
        joint = self.target[0]
        for conditional in self.target[1:]:
            joint = joint[..., None] * conditional
        return joint

    def verify(
        self,
        draws: int,
        *,
        block_verification: bool,
        seeds: torch.Tensor | None = None,
        anchors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Accepted]:
        """Drafts `(draws, γ)` as the drafter draws them, and what the accept rule makes of them."""
        steps = self.num_drafts
        if seeds is None:
            seeds = torch.randint(-(2**63), 2**63 - 1, (draws,))
        if anchors is None:
            anchors = torch.randint(5000, (draws,))
        logits = (self.draft.float().log() * self.temperature).expand(draws, -1, -1)
        temperatures = torch.full((draws,), self.temperature)
        drafts = sample_draft(
            logits.flatten(0, 1),
            self.ids,
            temperatures.repeat_interleave(steps),
            seeds.repeat_interleave(steps),
            row_offsets(anchors, steps),
            Stream.DRAFT_TOKEN.value,
        ).view(draws, steps)
        column_of = None
        if self.ids is not None:
            column_of = torch.zeros(VOCAB, dtype=torch.int32)
            column_of[self.ids] = torch.arange(len(self.ids), dtype=torch.int32)
        proposal = propose(
            logits, temperatures=temperatures, ids=self.ids, column_of=column_of
        )
        prefixes = [tuple(drafts[:, :i].T) for i in range(steps + 1)]
        target = torch.stack(
            [
                p[prefix] if prefix else p.expand(draws, -1)
                for p, prefix in zip(self.target, prefixes, strict=True)
            ],
            dim=1,
        )
        accepted = accept_rejection(
            drafts,
            target.float(),
            proposal,
            seeds=seeds,
            anchors=anchors,
            block_verification=block_verification,
        )
        return drafts, accepted

    def completed(self, accepted: Accepted) -> Estimate:
        """The distribution of the text: every row's committed tokens, continued by the target."""
        tokens, draws = accepted.tokens, len(accepted.tokens)
        mean = torch.zeros_like(self.joint())
        square = torch.zeros_like(mean)
        for kept in range(self.num_drafts + 1):
            prefixes = tokens[accepted.num_correct == kept, : kept + 1]
            index = (prefixes * VOCAB ** torch.arange(kept, -1, -1)).sum(dim=1)
            share = torch.bincount(index, minlength=VOCAB ** (kept + 1)).double() / draws
            first = second = share.view((VOCAB,) * (kept + 1))
            for conditional in self.target[kept + 1 :]:
                first, second = first[..., None] * conditional, second[..., None] * conditional**2
            mean += first
            square += second
        return Estimate(mean, square, self.joint(), draws)

    def accept_distribution(self, *, block_verification: bool) -> torch.Tensor:
        """Probability of keeping `0 … γ` drafts, enumerated over all drafts in float64.

        Token-wise: Leviathan et al. 2023, algorithm 1. Block-wise: Sun et al. 2024, algorithm 2.
        """
        q, steps = self.wide_draft(), self.num_drafts
        outcome = torch.zeros(steps + 1, dtype=torch.float64)
        support = range(VOCAB) if self.ids is None else self.ids.tolist()
        for x in itertools.product(support, repeat=steps):
            probability = prod(float(q[i, x[i]]) for i in range(steps))
            if probability == 0:
                continue
            p = [float(self.target[i][x[:i]][x[i]]) for i in range(steps)]
            ratios = [p[i] / float(q[i, x[i]]) for i in range(steps)]
            if block_verification:
                kept = self._block_outcome(x, ratios, q)
            else:
                reach = [prod(min(1.0, r) for r in ratios[:i]) for i in range(steps + 1)]
                kept = [a - b for a, b in zip(reach, [*reach[1:], 0.0], strict=True)]
            outcome += probability * torch.tensor(kept, dtype=torch.float64)
        return outcome

    def _block_outcome(self, x: tuple, ratios: list[float], q: torch.Tensor) -> list[float]:
        r, accept = 1.0, []
        for i, ratio in enumerate(ratios):
            r = min(1.0, r * ratio)
            if i + 1 == len(ratios) or r == 1.0:
                accept.append(r)
                continue
            excess = (r * self.target[i + 1][x[: i + 1]] - q[i + 1]).clamp_min(0).sum()
            accept.append(float(excess / (excess + 1 - r)))
        kept, none_later = [], 1.0
        for h in reversed(accept):
            kept.append(h * none_later)
            none_later *= 1 - h
        return [none_later, *reversed(kept)]


def random_target(num_drafts: int, spread: float = 1.5) -> list[torch.Tensor]:
    """Every conditional a softmax of normal logits."""
    return [
        (spread * torch.randn((VOCAB,) * (i + 1), dtype=torch.float64)).softmax(-1)
        for i in range(num_drafts + 1)
    ]


def random_draft(num_drafts: int, size: int = VOCAB, spread: float = 1.0) -> torch.Tensor:
    return (spread * torch.randn(num_drafts, size, dtype=torch.float64)).softmax(-1)


def keep_tokens(target: list[torch.Tensor], tokens: list[int]) -> list[torch.Tensor]:
    """Every conditional restricted to `tokens` and renormalised."""
    mask = torch.zeros(VOCAB, dtype=torch.float64)
    mask[tokens] = 1
    return [(p * mask) / (p * mask).sum(-1, keepdim=True) for p in target]
