"""What a draft is trained on: two stages and a baseline.

Notation: `y` the block's tokens, `c` its context, `x_s = (1-s) x0 + s onehot(y)`, `δ_{s,t}(x; c)`
the network's distribution a slot (softmax of its logits), `X_{s,t}` the jump it makes:

    X_{s,t}(x) = ((1-t) x + (t-s) δ_{s,t}(x)) / (1-s).

Every term is `Σ_k w_k CE`, `w_k = exp(-k / decay)` over slots k = 0 … K-1 that have a label,
divided by their sum: an early slot's miss throws the later ones away.

Stage 1, `flow` (Flow Map Language Models, arXiv:2602.16813: a denoiser learnt by cross-entropy)

    L = E_{y, x0, τ(s) ~ U[0,1]}  CE(onehot(y), δ_{s,s}(x_s))

with the decoding-error clock τ of `times.py`. Its optimum is `E[onehot(y) | x_s, c]`.

Stage 2, `map`: the two-time denoiser distilled by the semigroup property
X_{s,t} = X_{u,t} ∘ X_{s,u}. Written in δ it is a convex combination, so the teacher is a
distribution and cross-entropy applies:

    δ̄_{s,t}(x) = γ δ_{s,u}(x) + (1-γ) δ_{u,t}(X_{s,u}(x)),   γ = (1-t)(u-s) / ((1-u)(t-s))
    L = E_{s<u<t} CE(δ̄_{s,t}(x_s), δ_{s,t}(x_s)) + E_t CE(D_t(x_t), δ_{t,t}(x_t))

The first teacher is the exponential moving average of the network itself, without gradient; `D` is
the frozen stage 1. A share `diagonal` of the blocks takes the second term, a share `one_jump` the
jump a server makes (s = 0, t = 1: γ = 0, the teacher is `δ_{u,1}(X_{0,u}(x0))`), the rest three
sorted uniform ticks. Long jumps are let in over the first part of the stage, as their teachers have
to be right first. `data_weight` adds that multiple of the baseline's term.

Baseline, `one-jump`: `CE(y, δ_{0,1}(x0))` with noise `x0` independent of `y`. Its optimum is the
slots' marginal distribution given `c` whatever the noise: the best that independent slots can do,
and what stage 2 has to beat. With `labels="target"` the label of slot k is the target's own
distribution after the true tokens before it: the same expectation with less variance. That is not
sound in stage 1, where `x_s` already shows `y`. With `acceptance_weight` λ the baseline's term is
(1-λ) CE + λ times a loss on what rejection sampling keeps of the draft (`acceptance_loss.py`): the
slots' marginals are the best fit, but not what is accepted most.

Known: the objective, γ, the clock and its grids (which reproduce the published ones), the share of
the diagonal term as a sum. Not found in any public text: FlashMap's own training recipe (times,
anchors, slot weights, EMA, learning rate, data). Those are choices here, to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from train.acceptance_loss import acceptance_value, terms_loss
from train.draws import Draws
from train.features import TargetReader
from train.network import Blocks
from train.noise import noise_embedding, noised, read_state, uniform_posterior
from train.times import time_at
from train.vocabulary_loss import Heads, Tokens, chunk_rows, cross_entropy, logits_of

_LET_IN = 0.3
"""Part of stage 2 over which long jumps are let in."""


@dataclass(frozen=True)
class Example:
    """A batch with the target's features."""

    blocks: Blocks
    labels: torch.Tensor
    """`(B, A, K)` int64, -1 where there is none."""
    final_hidden: torch.Tensor
    """`(B, S, H)`: what the LM head reads at each position."""


class Objective(Protocol):
    def loss(
        self, network: nn.Module, example: Example, draws: Draws, progress: float
    ) -> torch.Tensor:
        """A scalar to be lowered; `progress` in [0, 1] is how far the run is."""


class _Common:
    def __init__(self, reader: TargetReader, *, decay: float) -> None:
        self.reader, self._decay = reader, decay
        self._vocab = reader.embedding.shape[0]

    def _weights(self, labels: torch.Tensor) -> torch.Tensor:
        """`(B·A·K,)`, summing to 1."""
        slots = torch.arange(labels.shape[-1], device=labels.device)
        weights = torch.exp(-slots / self._decay) * (labels >= 0)
        return (weights / weights.sum().clamp_min(1e-9)).flatten()


def known_states(example: Example) -> torch.Tensor:
    """`(B·A·K, H)`: what the target's LM head reads after the true tokens before each slot."""
    slots = torch.arange(example.labels.shape[-1], device=example.labels.device)
    places = example.blocks.anchors[..., None] + slots
    places = places.clamp_max(example.final_hidden.shape[1] - 1).flatten(1)
    rows = torch.arange(len(places), device=places.device)[:, None]
    return example.final_hidden[rows, places].flatten(0, 1)


class OneJump(_Common):
    """The baseline."""

    def __init__(
        self,
        reader: TargetReader,
        *,
        decay: float,
        labels: str = "tokens",
        acceptance_weight: float = 0.0,
        acceptance_loss: str = "length",
    ) -> None:
        super().__init__(reader, decay=decay)
        self._soft = labels == "target"
        self._acceptance_weight, self._acceptance_loss = acceptance_weight, acceptance_loss
        self._uniform = uniform_posterior(reader.embedding).float()

    def hidden(self, network: nn.Module, blocks: Blocks, shape: tuple, draws: Draws):
        """The jump from noise to tokens: `(B, A, K, H)` for `shape = (B, A, K)`."""
        device = blocks.hidden.device
        linear = noise_embedding(shape, self.reader.factor, draws.generator(device, "one-jump"))
        start = torch.zeros(shape[:2], device=device)
        return network(self._uniform, linear, start, torch.ones_like(start), blocks)

    def loss(
        self, network: nn.Module, example: Example, draws: Draws, progress: float
    ) -> torch.Tensor:
        labels, head = example.labels, self.reader.lm_head
        hidden = self.hidden(network, example.blocks, tuple(labels.shape), draws).flatten(0, 2)
        weights, ids = self._weights(labels), labels.clamp_min(0).flatten()
        if self._acceptance_weight:
            value = acceptance_value(
                self._acceptance_loss,
                self._acceptance_weight,
                weights,
                (labels >= 0).flatten(0, 1),
            )
            return terms_loss(hidden, head, known_states(example), ids, labels.shape[-1], value)
        target = Heads(known_states(example)) if self._soft else Tokens(ids)
        return cross_entropy(hidden, weights, head, target)


class _NoisedBlocks:
    """The states `x_s` of all slots: drawn in chunks, again whenever they are needed."""

    def __init__(
        self, reader: TargetReader, labels: torch.Tensor, times: torch.Tensor, draws: Draws
    ) -> None:
        self._reader, self._draws, self.shape = reader, draws, labels.shape
        # A slot without a label weighs nothing but is seen by the others: it holds token 0.
        self._tokens = labels.clamp_min(0).flatten()
        self._times = times[..., None].expand(labels.shape).flatten()
        rows = chunk_rows(reader.embedding.shape[0])
        self._parts = [slice(i, i + rows) for i in range(0, len(self._tokens), rows)]

    def _chunks(self):  # noqa: ANN202
        for part in self._parts:
            stream = self._draws.generator(self._tokens.device, "state", part.start)
            vocab = self._reader.embedding.shape[0]
            yield part, noised(self._tokens[part], self._times[part], vocab, stream)

    @torch.no_grad()
    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Posterior and linear terms, each `(B, A, K, H)`."""
        return self._join(
            read_state(state, self._times[part], self._reader.embedding)
            for part, state in self._chunks()
        )

    @torch.no_grad()
    def read_after_jump(
        self, hidden: torch.Tensor, end: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of `X_{s,end}(x_s)`, `hidden (B, A, K, H)` being the network's at `x_s`."""
        hidden, ends = hidden.flatten(0, 2), end[..., None].expand(self.shape).flatten()

        def moved():  # noqa: ANN202
            for part, state in self._chunks():
                s, t = self._times[part, None], ends[part, None]
                landed = logits_of(hidden[part], self._reader.lm_head).softmax(-1)
                state = ((1 - t) * state + (t - s) * landed) / (1 - s)
                yield read_state(state, ends[part], self._reader.embedding)

        return self._join(moved())

    def _join(self, parts) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN001
        posterior, linear = zip(*parts)
        return (
            torch.cat(posterior).view(*self.shape, -1),
            torch.cat(linear).view(*self.shape, -1),
        )


class Flow(_Common):
    """Stage 1."""

    def loss(
        self, network: nn.Module, example: Example, draws: Draws, progress: float
    ) -> torch.Tensor:
        labels = example.labels
        times = time_at(draws.uniform(tuple(labels.shape[:2]), "time"), self._vocab)
        times = times.to(labels.device)
        posterior, linear = _NoisedBlocks(self.reader, labels, times, draws).read()
        hidden = network(posterior, linear, times, times, example.blocks)
        return cross_entropy(
            hidden.flatten(0, 2),
            self._weights(labels),
            self.reader.lm_head,
            Tokens(labels.clamp_min(0).flatten()),
        )


class Map(_Common):
    """Stage 2. `teacher` is the moving average of the network, `flow` the frozen stage 1."""

    def __init__(
        self,
        reader: TargetReader,
        teacher: nn.Module,
        flow: nn.Module,
        *,
        decay: float,
        one_jump: float = 0.5,
        diagonal: float = 0.25,
        data_weight: float = 0.0,
        labels: str = "tokens",
    ) -> None:
        super().__init__(reader, decay=decay)
        self._teacher, self._flow = teacher, flow
        self._one_jump, self._diagonal = one_jump, diagonal
        self._data_weight = data_weight
        self._data = OneJump(reader, decay=decay, labels=labels)

    def times(
        self, shape: tuple[int, int], draws: Draws, progress: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`s ≤ u ≤ t`, each `shape`, on the CPU; all equal on the diagonal."""
        let_in = min(1.0, progress / _LET_IN)
        kind = draws.uniform(shape, "kind")
        low, middle, high = draws.uniform((3, *shape), "ticks").sort(dim=0).values
        # A jump of the first steps is a tenth of the clock at most.
        longest = 0.1 + 0.9 * let_in
        middle, high = low + longest * (middle - low), low + longest * (high - low)
        s, u, t = (time_at(tick, self._vocab) for tick in (low, middle, high))
        on_diagonal = kind < self._diagonal
        whole = kind >= 1.0 - self._one_jump * let_in
        u, t = torch.where(on_diagonal, s, u), torch.where(on_diagonal, s, t)
        u = torch.where(whole, time_at(draws.uniform(shape, "middle"), self._vocab), u)
        return torch.where(whole, 0.0, s), u, torch.where(whole, 1.0, t)

    def loss(
        self, network: nn.Module, example: Example, draws: Draws, progress: float
    ) -> torch.Tensor:
        labels, blocks, head = example.labels, example.blocks, self.reader.lm_head
        s, u, t = (
            time.to(labels.device)
            for time in self.times(tuple(labels.shape[:2]), draws, progress)
        )
        states = _NoisedBlocks(self.reader, labels, s, draws)
        terms = states.read()
        with torch.no_grad():
            first = self._teacher(*terms, s, u, blocks).float()
            first = torch.where(
                (s == t)[..., None, None], self._flow(*terms, s, s, blocks).float(), first
            )
            second = self._teacher(*states.read_after_jump(first, u), u, t, blocks).float()
            share = first_jump_share(s, u, t)[..., None].expand(labels.shape).flatten()
            teacher = Heads(first.flatten(0, 2), second.flatten(0, 2), share)

        hidden = network(*terms, s, t, blocks).flatten(0, 2)
        loss = cross_entropy(hidden, self._weights(labels), head, teacher)
        if self._data_weight:
            loss = loss + self._data_weight * self._data.loss(network, example, draws, progress)
        return loss


def first_jump_share(s: torch.Tensor, u: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """`γ`: what the jump `s → u` contributes to `s → t`; 1 where `s = t`."""
    length = (1 - u) * (t - s)
    return torch.where(length > 0, (1 - t) * (u - s) / length.clamp_min(1e-12), 1.0)
