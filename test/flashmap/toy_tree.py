"""A toy server of trees: the real planner, accept rules and penalties around a target of 5 tokens.

Every request answers the same prompt, so that its first tokens have one exact distribution, which
is enumerated here in float64 by code of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from math import pi
from types import SimpleNamespace

import torch
from sampling_fields import requests_of, sampling_info
from sglang.kernels.ops.speculative.flashmap.slot_choices import slot_choices
from sglang.kernels.ops.speculative.flashmap.slot_draws import slot_draws
from sglang.kernels.ops.speculative.flashmap.tree import plan_tree
from sglang.kernels.ops.speculative.flashmap.tree_growth import grow_tree
from sglang.srt.speculative.flashmap.accept import Acceptor
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.draft_sampling import draft_sampling
from sglang.srt.speculative.flashmap.drafter import DraftBlock
from sglang.srt.speculative.flashmap.history import TokenHistory
from sglang.srt.speculative.flashmap.penalties import (
    CountedRequests,
    Penalties,
    penalize_block,
)
from sglang.srt.speculative.flashmap.plan import StepRules, VerifyBlock, draw_weights
from sglang.srt.speculative.flashmap.verify import Accepted

VOCAB = 5
PROMPT = 7
"""Tokens of the prompt; the anchor of the first step is the first output token, 0."""


def _of_rows(info: SimpleNamespace, rows: torch.Tensor) -> SimpleNamespace:
    values = {
        name: value[rows] if isinstance(value, torch.Tensor) else value
        for name, value in vars(info).items()
    }
    return SimpleNamespace(**values)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of all requests."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0

    @property
    def penalized(self) -> bool:
        return (self.frequency, self.presence, self.repetition) != (0.0, 0.0, 1.0)

    def fields(self, size: int) -> SimpleNamespace:
        def per_request(value: float | None) -> list | None:
            return None if value is None else [value] * size

        return sampling_info(
            [self.temperature] * size,
            top_ks=per_request(self.top_k),
            top_ps=per_request(self.top_p),
            min_ps=per_request(self.min_p),
        )

    def distribution(self, logits: list[float], output: tuple[int, ...]) -> list[float]:
        """Probabilities of the token after `output`, one token and one filter at a time."""
        logits = list(logits)
        for token in set(output):
            logits[token] -= self.frequency * output.count(token) + self.presence
            logits[token] *= self.repetition if logits[token] < 0 else 1 / self.repetition
        weights = torch.tensor(logits, dtype=torch.float64).div(self.temperature).softmax(0)
        keep, mass = [], 0.0
        for rank, token in enumerate(weights.argsort(descending=True).tolist()):
            weight = float(weights[token])
            if (
                (self.top_k is None or rank < self.top_k)
                and (self.top_p is None or mass <= self.top_p)
                and (self.min_p is None or weight >= self.min_p * float(weights.max()))
            ):
                keep.append(token)
            mass += weight
        total = sum(float(weights[token]) for token in keep)
        return [float(weights[t]) / total if t in keep else 0.0 for t in range(VOCAB)]


@dataclass
class ToyServer:
    """`candidates` blocks of `block_size` drafts, verified `width` rows at a time; trees grow from
    `choices` tokens of each slot, or are cut by votes."""

    block_size: int = 2
    width: int = 5
    candidates: int = 3
    choices: int = 0
    tree_temperature: float = 10.0
    draft_temperature: float = 1.0
    block_verification: bool = False
    seed: int = 0
    target: torch.Tensor = field(init=False)
    """Logits `(V, V, V)` after the last two tokens."""
    draft: torch.Tensor = field(init=False)
    """Logits `(V, K, V)` after the anchor."""

    def __post_init__(self) -> None:
        self._generator = generator = torch.Generator().manual_seed(self.seed)
        self.target = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        # Near the target's, so that drafts are often kept.
        likely = self.target.mean(0)[:, None].expand(-1, self.block_size, -1)
        noise = torch.randn(VOCAB, self.block_size, VOCAB, generator=generator)
        self.draft = likely + 0.5 * noise

    @property
    def serve(self) -> FlashMapServeConfig:
        return FlashMapServeConfig(
            block_size=self.block_size,
            verify_width=self.width,
            grid=(0.0, 1.0),
            draft_vocab_size=0,
            block_verification=self.block_verification,
            draft_temperature=self.draft_temperature,
            tree_candidates=self.candidates,
            tree_choices=self.choices,
            tree_budget=1 << 40,
            tree_temperature=self.tree_temperature,
        )

    def generate(
        self, info: SimpleNamespace, seeds: torch.Tensor, length: int, sampling: Sampling
    ) -> tuple[torch.Tensor, list[Accepted]]:
        """Texts `(B, length)` of one request a seed, and what each step accepted."""
        size = len(seeds)
        text = torch.zeros(size, 1 + length + 2 * self.block_size + 2, dtype=torch.int64)
        done = torch.ones(size, dtype=torch.int64)  # the anchor
        history = TokenHistory(size, PROMPT + text.shape[1], "cpu")
        rows = torch.arange(size)
        history.write(rows, torch.full((size,), PROMPT), text[:, :1])
        batch = SimpleNamespace(sampling_info=info, reqs=requests_of(info, size), seq_lens=done)
        rules = StepRules.of(batch, self.serve)
        acceptor = Acceptor(
            self.serve,
            SimpleNamespace(draft_ids=None, draft_columns=None),
            SimpleNamespace(seeds=seeds),
        )
        steps = []
        while len(rows := (done <= length).nonzero()[:, 0]):  # those that are ready leave the batch
            batch = SimpleNamespace(
                sampling_info=_of_rows(info, rows),
                req_pool_indices=rows,
                seq_lens=PROMPT + done[rows] - 1,
            )
            of_rows = rules
            if rules.rejected is not None:
                of_rows = dataclasses.replace(rules, rejected=rules.rejected[rows])
            draft, block = self._draft(text[rows], done[rows], batch, of_rows)
            logits = self._logits(text[rows], done[rows], block)
            if sampling.penalized:
                self._penalize(logits, sampling, history, batch, block)
            accepted = acceptor.accept(batch, of_rows, draft, block, logits)
            columns = done[rows, None] + torch.arange(accepted.tokens.shape[1])
            text[rows[:, None], columns] = accepted.tokens
            history.write(rows, batch.seq_lens + 1, accepted.tokens)
            done[rows] += accepted.num_correct + 1
            steps.append(accepted)
        return text[:, 1 : length + 1], steps

    def _draft(self, text, done, batch, rules) -> tuple[DraftBlock, VerifyBlock]:
        size = len(text)
        anchors = text.gather(1, done[:, None] - 1)[:, 0]
        logits = self.draft[anchors].repeat(1, self.candidates, 1)
        temperatures, _ = draft_sampling(batch.sampling_info, self.draft_temperature)
        # Drafts are not what is under test: any draws from the proposal will do.
        scores = logits / temperatures.view(-1, 1, 1).clamp_min(1e-6)
        scores -= torch.empty_like(scores).exponential_(generator=self._generator).log()
        tokens = scores.argmax(-1).view(size, self.candidates, self.block_size)
        rejected = rules.under_rejection(size, tokens.device)
        if self.choices:
            slots = logits.view(size, self.candidates, self.block_size, VOCAB)
            likely, probs = slot_choices(slots, None, temperatures, self.choices)
            block = tokens[:, 0].contiguous()
            if self.serve.draws_trees:
                self._draw(slots, temperatures, rejected, likely, probs)
                block = rejected = None
            tree = grow_tree(anchors, likely, probs, block, self.width, rejected)
        else:
            tree = plan_tree(anchors, tokens, self.width, rejected)
        draft = DraftBlock(tokens[:, 0], logits[:, : self.block_size], temperatures, tree)
        return draft, VerifyBlock.of_tree(tree)

    def _draw(self, slots, temperatures, rejected, likely, probs) -> None:
        rows = slots.shape[:3].numel()
        seeds = torch.randint(1 << 62, (rows,), generator=self._generator)
        weights = draw_weights(self.choices, slots.device)
        drawn = temperatures, seeds, torch.arange(rows), 4, rejected, weights
        slot_draws(slots.contiguous(), None, *drawn, likely, probs)

    def _logits(self, text, done, block: VerifyBlock) -> torch.Tensor:
        before = text.gather(1, (done[:, None] - 2).clamp_min(0))
        parents = block.tree.parents.to(torch.int64)
        previous = block.tokens.gather(1, parents.clamp_min(0))
        previous = torch.where(parents < 0, before, previous)
        return self.target[previous, block.tokens].flatten(0, 1)

    def _penalize(self, logits, sampling, history, batch, block) -> None:
        size = len(block.tokens)
        values = [sampling.frequency, sampling.presence, sampling.repetition]
        counted = CountedRequests(
            index=torch.arange(size),
            rows=batch.req_pool_indices,
            starts=torch.full((size,), PROMPT),
            penalties=torch.tensor([values]).expand(size, -1),
            longest=int((batch.seq_lens - PROMPT).max()) + 1,
        )
        penalize_block(
            logits,
            Penalties(counted, None),
            history,
            lens=batch.seq_lens,
            block=block.tokens,
            path=block.path,
        )

    def joint(self, sampling: Sampling, length: int) -> torch.Tensor:
        """The exact distribution of the first `length` tokens after the anchor, flat."""
        probs = []
        for text in itertools.product(range(VOCAB), repeat=length):
            output, probability = (0,), 1.0
            for token in text:
                if probability == 0.0:
                    break
                last_two = (output[-2] if len(output) > 1 else 0, output[-1])
                row = sampling.distribution(self.target[last_two].tolist(), output)
                probability *= row[token]
                output += (token,)
            probs.append(probability)
        return torch.tensor(probs, dtype=torch.float64)


@dataclass(frozen=True)
class Distance:
    """How far texts are from a distribution, in units of what fair draws are."""

    total_variation: float
    expected: float
    worst_cell: float

    @classmethod
    def of(cls, texts: torch.Tensor, joint: torch.Tensor) -> "Distance":
        length, draws = texts.shape[1], len(texts)
        index = (texts * VOCAB ** torch.arange(length - 1, -1, -1)).sum(dim=1)
        found = torch.bincount(index, minlength=VOCAB**length).double() / draws
        error = (joint * (1 - joint) / draws).clamp_min(1e-18).sqrt()
        frequent = joint * draws >= 10
        return cls(
            float((found - joint).abs().sum() / 2),
            float(error.sum() * (2 / pi) ** 0.5 / 2),
            float(((found - joint).abs() / error)[frequent].max()),
        )

    @property
    def is_noise(self) -> bool:
        return self.total_variation < 1.5 * self.expected + 1e-3 and self.worst_cell < 5
