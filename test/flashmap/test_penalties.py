"""Penalties of a block against upstream's own penalizers, fed one token at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from penalized_batch import (
    END,
    FREE,
    VOCAB,
    Request,
    random_request,
    schedule_batch,
    upstream_logits,
    upstream_penalties,
)
from sglang.srt.sampling.stop_tokens import stop_tokens
from sglang.srt.speculative.flashmap import penalties as penalties_module
from sglang.srt.speculative.flashmap.history import TokenHistory
from sglang.srt.speculative.flashmap.penalties import (
    OutputCounts,
    Penalties,
    is_counted,
    penalize_block,
    penalize_resumed,
)

WIDTH, ROWS, CONTEXT = 6, 9, 40
CHAIN = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
ALL = dict(frequency_penalty=0.3, presence_penalty=0.7, repetition_penalty=1.3, min_new_tokens=6)
PARAMS = {
    "frequency": dict(frequency_penalty=0.1),  # 0.1 + 0.1 + 0.1 is not 3 · 0.1
    "negative-frequency": dict(frequency_penalty=-1.1),
    "presence": dict(presence_penalty=1.5),
    "repetition": dict(repetition_penalty=1.7),
    "repetition-below-1": dict(repetition_penalty=0.6),
    "min-new-tokens": dict(min_new_tokens=4, stop_token_ids={5, 7}),
    "all": ALL,
}


def random_tree(rng: random.Random) -> torch.Tensor:
    """The paths `(W, W)` of a random tree."""
    path = torch.eye(WIDTH, dtype=torch.bool)
    for node in range(1, WIDTH):
        path[node] |= path[rng.randrange(node)]
    return path


def remember(history: TokenHistory, req: Request, row: int, rng: random.Random) -> None:
    """Write the outputs of `req` as steps do: some tokens and an uncommitted tail at a time."""
    done = 0
    while done < len(req.output):
        step = rng.randint(1, 4)
        tokens = req.output[done : done + step]
        tail = rng.choices(range(VOCAB), k=rng.randint(0, 3))
        start = torch.tensor([len(req.prompt) + done])
        history.write(torch.tensor([row]), start, torch.tensor([tokens + tail]))
        done += len(tokens)


def penalized(
    reqs: Sequence[Request], paths: torch.Tensor, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `(B, W, V)` of a random block after `reqs`: by FLASHMAP, and by upstream."""
    rows = rng.sample(range(ROWS), len(reqs))
    history = TokenHistory(ROWS, CONTEXT, "cpu")
    for req, row in zip(reqs, rows):
        remember(history, req, row, rng)
    block = torch.randint(VOCAB, (len(reqs), WIDTH))
    block[:, 0] = torch.tensor([req.output[-1] for req in reqs])
    logits = 2 * torch.randn(len(reqs) * WIDTH, VOCAB)
    expected = torch.stack(
        [
            upstream_logits(
                req, req.output[:-1] + block[b][paths[b, j]].tolist(), logits[b * WIDTH + j]
            )
            for b, req in enumerate(reqs)
            for j in range(WIDTH)
        ]
    )
    lens = [req.committed for req in reqs]
    batch = schedule_batch(reqs, rows, lens)
    found = Penalties.of(batch, batch.seq_lens + rng.randint(0, 2 * WIDTH))
    if found is not None:
        penalize_block(logits, found, history, lens=batch.seq_lens, block=block, path=paths)
    shape = (len(reqs), WIDTH, VOCAB)
    return logits.view(shape), expected.view(shape)


def chains(size: int) -> torch.Tensor:
    return CHAIN.expand(size, -1, -1)


@pytest.mark.parametrize("name", PARAMS)
def test_equals_upstream_token_by_token(name: str) -> None:
    rng = random.Random(name)
    for size in (1, 2, 4) * 5:
        reqs = [random_request(rng, PARAMS[name]) for _ in range(size)]
        logits, expected = penalized(reqs, chains(size), rng)
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("scratch", [1 << 24, 1], ids=["at-once", "one-by-one"])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_mixed_batches(kind: str, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request by its own parameters, whatever its neighbours ask for."""
    monkeypatch.setattr(penalties_module, "_SCRATCH", scratch)
    rng = random.Random(kind)
    everything = [*PARAMS.values(), FREE]
    for _ in range(20):
        reqs = [random_request(rng, rng.choice(everything)) for _ in range(rng.randint(1, 6))]
        trees = torch.stack([random_tree(rng) for _ in reqs])
        logits, expected = penalized(reqs, trees if kind == "tree" else chains(len(reqs)), rng)
        assert torch.equal(logits, expected)


def test_min_new_tokens_ends_within_the_block() -> None:
    req = Request(dict(min_new_tokens=5), [3], [4, 4, 4])
    logits, _ = penalized([req], chains(1), random.Random(0))
    # Row 0 holds the 4th output token, row 2 the 6th.
    assert logits[0, :, END].isinf().tolist() == [True, True, *[False] * 4]
    assert logits[0, :, 1].isinf().tolist() == [True, True, *[False] * 4]


def test_the_host_may_be_a_step_behind() -> None:
    """With overlap scheduling the host does not know the last step's tokens yet."""
    rng = random.Random(1)
    for _ in range(5):
        reqs = [random_request(rng, ALL, known=rng.randint(0, 1)) for _ in range(3)]
        logits, expected = penalized(reqs, chains(3), rng)
        assert torch.equal(logits, expected)


def test_half_precision_logits_round_as_upstream() -> None:
    req = Request(ALL, [1], [3, 4, 3])
    history = TokenHistory(ROWS, CONTEXT, "cpu")
    history.write(torch.tensor([0]), torch.tensor([1]), torch.tensor([req.output]))
    logits = torch.randn(WIDTH, VOCAB).bfloat16()
    block = torch.tensor([[3, 5, 4, 5, 3, 3]])
    said = [req.output[:-1] + block[0, : j + 1].tolist() for j in range(WIDTH)]
    expected = torch.stack([upstream_logits(req, s, row) for s, row in zip(said, logits)])
    batch = schedule_batch([req], [0], [req.committed])
    found = Penalties.of(batch, batch.seq_lens)
    penalize_block(logits, found, history, lens=batch.seq_lens, block=block, path=chains(1))
    assert torch.equal(logits, expected)


def test_counting_only_before_the_block_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(self: OutputCounts, path: torch.Tensor, *_: object) -> OutputCounts:
        return OutputCounts(self.spent.expand_as(path), self.said.expand_as(path))

    monkeypatch.setattr(OutputCounts, "after", frozen)
    req = Request(ALL, [1], [3, 4, 3])
    logits, expected = penalized([req], chains(1), random.Random(0))
    assert torch.equal(logits[0, 0], expected[0, 0])
    assert not torch.equal(logits, expected)


def test_a_batch_without_penalties_costs_nothing() -> None:
    reqs = [Request(FREE, [1], [2])] * 2
    batch = schedule_batch(reqs, [0, 1], [1, 1])
    batch.reqs = None  # not looked at
    assert Penalties.of(batch, batch.seq_lens) is None
    batch.sampling_info = None
    assert Penalties.of(batch, batch.seq_lens) is None
    assert TokenHistory(10**6, 10**6, "cpu")._tokens is None


# --- prefill ---------------------------------------------------------------------------------


def test_a_retracted_request_keeps_its_counts() -> None:
    """Its prefill samples with all outputs counted, and later steps find them in the history."""
    rng = random.Random(2)
    for _ in range(10):
        reqs = [random_request(rng, rng.choice([*PARAMS.values(), FREE])) for _ in range(5)]
        for req in rng.sample(reqs, 2):
            req.output = []
        rows = rng.sample(range(ROWS), len(reqs))
        lens = [len(req.prompt) + len(req.output) for req in reqs]
        batch = schedule_batch(reqs, rows, lens)
        info = batch.sampling_info
        if info.acc_additive_penalties is None:
            continue
        history = TokenHistory(ROWS, CONTEXT, "cpu")
        penalize_resumed(batch, history, batch.seq_lens)
        for i, req in enumerate(reqs):
            additive, scaling = upstream_penalties([req], req.output)
            additive = torch.zeros(1, VOCAB) if additive is None else additive
            assert torch.equal(info.acc_additive_penalties[i], additive[0])
            if info.acc_scaling_penalties is not None:
                scaling = torch.ones(1, VOCAB) if scaling is None else scaling
                assert torch.equal(info.acc_scaling_penalties[i], scaling[0])
            else:
                assert scaling is None or (scaling == 1).all()
            if req.output and is_counted(req):
                where = torch.tensor([rows[i]]), torch.tensor([len(req.prompt)])
                tokens, _ = history.read(*where, where[1] + len(req.output), len(req.output))
                assert tokens[0].tolist() == req.output


def test_a_running_request_in_a_prefill_counts_what_the_host_does_not_know() -> None:
    """Under overlap scheduling a request joins a mixed chunk before its last step is processed."""
    rng = random.Random(4)
    for _ in range(20):
        reqs = [random_request(rng, params) for params in PARAMS.values()]
        for req in reqs:
            req.known = rng.randint(1, len(req.output))
        rows = rng.sample(range(ROWS), len(reqs))
        history = TokenHistory(ROWS, CONTEXT, "cpu")
        for req, row in zip(reqs, rows):
            remember(history, req, row, rng)
        batch = schedule_batch(reqs, rows, [len(req.prompt) + len(req.output) for req in reqs])
        penalize_resumed(batch, history, batch.seq_lens)
        info = batch.sampling_info
        for i, req in enumerate(reqs):
            additive, scaling = upstream_penalties([req], req.output)
            assert torch.equal(info.acc_additive_penalties[i], additive[0])
            if scaling is not None:
                assert torch.equal(info.acc_scaling_penalties[i], scaling[0])


def test_a_fresh_batch_scales_nothing() -> None:
    reqs = [Request(dict(repetition_penalty=1.2, min_new_tokens=2), [3], [])]
    batch = schedule_batch(reqs, [0], [1])
    penalize_resumed(batch, TokenHistory(ROWS, CONTEXT, "cpu"), batch.seq_lens)
    assert batch.sampling_info.acc_scaling_penalties is None
    assert batch.sampling_info.acc_additive_penalties.isinf().nonzero()[:, 1].tolist() == [END, 1]


def test_rows_of_different_lengths_stay_in_the_table() -> None:
    """A long prompt beside a long output must not reach past the end of its row."""
    long_prompt = Request(ALL, [2] * (CONTEXT - 2), [3, 4])
    long_output = Request(ALL, [2], [3, 4] * 15)
    reqs = [long_prompt, long_output]
    lens = [CONTEXT, 31]
    batch = schedule_batch(reqs, [0, 1], lens)
    history = TokenHistory(2, CONTEXT, "cpu")
    penalize_resumed(batch, history, batch.seq_lens)
    history.write(torch.tensor([0, 1]), torch.tensor(lens), torch.tensor([[5], [6]]))
    starts, ends = torch.tensor([CONTEXT - 2, 1]), torch.tensor(lens) + 1
    tokens, valid = history.read(torch.tensor([0, 1]), starts, ends, 40)
    assert tokens[0][valid[0]].tolist() == [3, 4, 5]
    assert tokens[1][valid[1]].tolist() == [3, 4] * 15 + [6]


# --- stop tokens -----------------------------------------------------------------------------


def test_stop_tokens() -> None:
    req = Request(dict(stop_token_ids={7, VOCAB, 10**7, -3}), [1], [2])
    assert stop_tokens(req, VOCAB) == [END, 1, 7]
    bare = SimpleNamespace(
        sampling_params=SimpleNamespace(stop_token_ids=None), eos_token_ids=None, tokenizer=None
    )
    assert stop_tokens(bare, VOCAB) == []


def test_upstreams_penalizer_survives_foreign_stop_tokens() -> None:
    req = Request(dict(min_new_tokens=3, stop_token_ids={7, 10**7, -3}), [1], [2])
    req.tokenizer = None
    additive, _ = upstream_penalties([req])
    assert additive.isinf().nonzero()[:, 1].tolist() == [1, 7]
