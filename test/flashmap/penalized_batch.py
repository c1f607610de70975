"""Batches with penalties, and how upstream penalises their logits, one token after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 12
END = 0
TOKENIZER = SimpleNamespace(eos_token_id=END, additional_stop_token_ids=None)
PENALIZERS = (
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
)
FREE: dict = {}


@dataclass
class Request:
    """What the penalties of FLASHMAP and of upstream read of a request."""

    params: dict
    prompt: list[int]
    output: list[int]
    """All of it, the anchor last; the host may know less."""
    known: int | None = None
    sampling_params: SamplingParams = field(init=False)
    eos_token_ids = frozenset({1})
    tokenizer = TOKENIZER

    def __post_init__(self) -> None:
        self.sampling_params = SamplingParams(**self.params)

    @property
    def origin_input_ids(self) -> list[int]:
        return self.prompt

    @property
    def output_ids(self) -> list[int]:
        return self.output[: self.known]

    @property
    def committed(self) -> int:
        """Tokens before the anchor."""
        return len(self.prompt) + len(self.output) - 1


def random_request(rng: random.Random, params: dict, **fields: int) -> Request:
    """Few tokens of a small vocabulary, so that most are said more than once."""
    prompt = rng.choices(range(VOCAB), k=rng.randint(1, 6))
    return Request(params, prompt, rng.choices(range(VOCAB), k=rng.randint(1, 9)), **fields)


class Batch(SimpleNamespace):
    """Fields of a `ScheduleBatch`; upstream keeps a weak reference to it."""

    device = "cpu"


def upstream_penalties(
    reqs: Sequence[Request], said: Sequence[int] = ()
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Upstream's accumulated penalties `(B, V)`, additive and scaling, after each said `said`."""
    batch = Batch(reqs=list(reqs))
    made = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, PENALIZERS)
    if not made.is_required:
        return None, None
    for token in said:
        made.cumulate_output_tokens(torch.full((len(reqs),), token))
    additive = torch.zeros(len(reqs), VOCAB)
    made.accumulate_additive_penalties(additive)
    return additive, made.accumulate_scaling_penalties()


def upstream_logits(req: Request, said: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """`logits (V,)` as upstream's sampler sees them after the request said `said`."""
    logits = logits[None].clone()
    additive, scaling = upstream_penalties([req], said)
    if additive is not None:
        logits.add_(additive)
    if scaling is not None:
        apply_scaling_penalties(logits, scaling)
    return logits[0]


def schedule_batch(reqs: Sequence[Request], rows: Sequence[int], lens: Sequence[int]) -> Batch:
    """`reqs` in `req_to_token` rows `rows`, with the penalties that the scheduler accumulates."""
    additive, scaling = upstream_penalties(reqs)
    return Batch(
        reqs=list(reqs),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lens),
        sampling_info=SimpleNamespace(
            acc_additive_penalties=additive, acc_scaling_penalties=scaling
        ),
    )
