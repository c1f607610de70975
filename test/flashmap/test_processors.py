"""Custom logit processors see each row of a block as the request that has said its path."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry
from sglang.srt.speculative.flashmap.processors import process_block

WIDTH, VOCAB = 6, 11


def chain(rng: random.Random) -> torch.Tensor:
    return torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()


def tree(rng: random.Random) -> torch.Tensor:
    path = torch.eye(WIDTH, dtype=torch.bool)
    for node in range(1, WIDTH):
        path[node] |= path[rng.randrange(node)]
    return path


class Last:
    """Adds 100 to the last token said, as a processor that looks back; keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        for row, asked in zip(logits, params, strict=True):
            req = asked["__req__"]
            self.seen.append([*req.origin_input_ids, *req.output_ids])
            assert req.rid == asked["name"]
            row[req.output_ids[-1]] += 100
        return logits


def request(rng: random.Random, name: str) -> SimpleNamespace:
    """Its output ends with the anchor."""
    said = array("q", rng.choices(range(VOCAB), k=rng.randint(1, 4)))
    return SimpleNamespace(rid=name, origin_input_ids=array("q", (1, 2)), output_ids=said)


@pytest.mark.parametrize("shape", [chain, tree])
def test_rows_are_shown_their_paths(shape: Any) -> None:
    rng = random.Random(0)
    reqs = [request(rng, f"r{i}") for i in range(4)]
    before = [list(req.output_ids) for req in reqs]
    block = torch.tensor([[*req.output_ids[-1:], *rng.choices(range(VOCAB), k=5)] for req in reqs])
    path = torch.stack([shape(rng) for _ in reqs])
    params = [dict(name=req.rid, __req__=req) for req in reqs]
    processor, places = Last(), [1, 3]
    info = SimpleNamespace(
        custom_params=[None if i not in places else params[i] for i in range(4)],
        custom_logit_processor={1: ProcessorEntry(processor, places, torch.tensor(places))},
    )
    logits = torch.randn(4 * WIDTH, VOCAB)
    expected = logits.clone()
    seen = []
    for place in places:
        for row in range(WIDTH):
            drafts = block[place, 1:][path[place, row, 1:]].tolist()
            said = before[place] + drafts
            expected[place * WIDTH + row, said[-1]] += 100
            seen.append([1, 2, *said])
    process_block(logits, SimpleNamespace(reqs=reqs, sampling_info=info), block=block, path=path)
    assert processor.seen == seen
    assert torch.equal(logits, expected)
    assert [list(req.output_ids) for req in reqs] == before, "the requests themselves were changed"


@pytest.mark.parametrize("params", [None, {}, dict(token_ids=[3])], ids=["none", "empty", "plain"])
def test_parameters_without_a_request_are_passed_on(params: dict | None) -> None:
    given: list[Any] = []

    def processor(logits: torch.Tensor, asked: list[Any]) -> torch.Tensor:
        given.extend(asked)
        return logits

    info = SimpleNamespace(
        custom_params=[params],
        custom_logit_processor={1: ProcessorEntry(processor, [0], torch.tensor([0]))},
    )
    batch = SimpleNamespace(reqs=[request(random.Random(0), "r")], sampling_info=info)
    path = chain(random.Random(0))[None]
    process_block(
        torch.zeros(WIDTH, VOCAB), batch, block=torch.zeros(1, WIDTH, dtype=torch.int64), path=path
    )
    assert given == [params] * WIDTH
