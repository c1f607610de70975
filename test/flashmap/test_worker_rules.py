"""Which draft temperature and which accept rule each request of a mixed batch gets."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from sampling_fields import NO_TOP_K, requests_of, sampling_info
from sglang.srt.speculative.flashmap import accept as accept_module
from sglang.srt.speculative.flashmap.accept import Acceptor
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.drafter import DraftBlock, DraftInputs
from sglang.srt.speculative.flashmap.plan import StepRules, VerifyBlock
from sglang.srt.speculative.flashmap.target import logit_scale
from sglang.srt.speculative.flashmap.verify import (
    Accepted,
    accept_greedy,
    accept_rejection,
    propose,
)
from sglang.srt.speculative.flashmap.worker import FlashMapWorker

BLOCK, WIDTH, VOCAB = 4, 4, 40
IDS = torch.arange(0, VOCAB, 2)


# Greedy rows draft at 0.
DRAFT_TEMPERATURES = torch.tensor([0.6, 0.0, 1.1])
SEEDS = torch.tensor([11, 22, 33, 44, 55])


def make_acceptor(
    *, restricted: bool = False, block_verification: bool = False, simulated: float = 0.0
) -> Acceptor:
    columns = torch.zeros(VOCAB, dtype=torch.int32)
    columns[IDS] = torch.arange(len(IDS), dtype=torch.int32)
    serve = FlashMapServeConfig(
        block_size=BLOCK,
        verify_width=WIDTH,
        grid=(0.0, 1.0),
        draft_vocab_size=len(IDS) if restricted else 0,
        block_verification=block_verification,
    )
    model = SimpleNamespace(
        draft_ids=IDS if restricted else None, draft_columns=columns if restricted else None
    )
    return Acceptor(serve, model, SimpleNamespace(seeds=SEEDS), simulated)


def accept(acceptor: Acceptor, batch: SimpleNamespace, draft: DraftBlock, logits: torch.Tensor):
    tokens = torch.cat([torch.zeros_like(draft.tokens[:, :1]), draft.tokens], dim=1)[:, :WIDTH]
    path = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    block = VerifyBlock.chain(tokens, path)
    rules = StepRules.of(batch, acceptor._serve)
    return acceptor.accept(batch, rules, draft, block, logits)


def greedy_outcome(drafts: torch.Tensor, logits: torch.Tensor) -> Accepted:
    block = torch.cat([torch.zeros_like(drafts[:, :1]), drafts], dim=1)
    return accept_greedy(block, logits.argmax(-1).view(3, WIDTH), torch.arange(3) + 9)


def make_step(info: SimpleNamespace | None, size: int, restricted: bool = False) -> tuple:
    """Batch, drafted block, verified drafts and target logits of a step of `size` requests."""
    batch = SimpleNamespace(
        reqs=requests_of(info, size),
        sampling_info=info,
        seq_lens=torch.arange(size) + 9,
        req_pool_indices=torch.tensor([4, 0, 2])[:size],
    )
    tokens = torch.randint(VOCAB, (size, BLOCK)) // 2 * 2
    columns = len(IDS) if restricted else VOCAB
    block = DraftBlock(tokens, 2 * torch.randn(size, BLOCK, columns), DRAFT_TEMPERATURES[:size])
    logits = 2 * torch.randn(size * WIDTH, VOCAB)
    logits[torch.arange(size) * WIDTH, tokens[:, 0]] += 6  # so that some drafts are kept
    return batch, block, tokens[:, : WIDTH - 1], logits


@pytest.mark.parametrize(
    "info", [None, sampling_info([1.0] * 3, top_ks=[1] * 3)], ids=["none", "k1"]
)
def test_a_greedy_batch_computes_no_distribution(
    info: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_module, "target_probs", None)
    monkeypatch.setattr(accept_module, "propose", None)
    batch, block, drafts, logits = make_step(info, 3)
    accepted = accept(make_acceptor(), batch, block, logits)
    expected = greedy_outcome(drafts, logits)
    assert torch.equal(accepted.num_correct, expected.num_correct)
    assert torch.equal(accepted.bonus, expected.bonus)
    assert accepted.num_correct.max() > 0


@pytest.mark.parametrize("restricted", [False, True], ids=["whole", "restricted"])
@pytest.mark.parametrize("block", [False, True], ids=["token-wise", "block-wise"])
def test_each_row_of_a_mixed_batch_follows_its_own_rule(block: bool, restricted: bool) -> None:
    """Rows 0 and 2 sample, row 1 is greedy; γ = 3 drafts of a block of 4 are verified."""
    temperatures, top_ks = [0.8, 1.0, 1.3], [NO_TOP_K, 1, 12]
    info = sampling_info(temperatures, top_ks=top_ks)
    acceptor = make_acceptor(restricted=restricted, block_verification=block)
    batch, draft, drafts, logits = make_step(info, 3, restricted)
    accepted = accept(acceptor, batch, draft, logits)

    greedy = greedy_outcome(drafts, logits)
    assert accepted.num_correct[1] == greedy.num_correct[1]
    assert accepted.bonus[1] == greedy.bonus[1]

    probs = (logits.view(3, WIDTH, VOCAB) / torch.tensor(temperatures)[:, None, None]).softmax(-1)
    kept = probs[2].topk(12).indices
    filtered = torch.zeros_like(probs[2]).scatter_(1, kept, probs[2].gather(1, kept))
    probs[2] = filtered / filtered.sum(-1, keepdim=True)
    proposal = propose(
        draft.logits[:, : WIDTH - 1],
        temperatures=torch.tensor([0.6, 1.0, 1.1]),
        ids=acceptor._model.draft_ids,
        column_of=acceptor._model.draft_columns,
    )
    expected = accept_rejection(
        drafts,
        probs,
        proposal,
        seeds=torch.tensor([55, 11, 33]),  # of rows 4, 0, 2
        anchors=batch.seq_lens,
        block_verification=block,
    )
    assert torch.equal(accepted.num_correct[[0, 2]], expected.num_correct[[0, 2]])
    assert torch.equal(accepted.bonus[[0, 2]], expected.bonus[[0, 2]])


@pytest.mark.parametrize("length", [1, 3, WIDTH], ids=lambda n: f"length-{n}")
def test_a_simulated_accept_length_replaces_every_rule(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_module, "SIMULATE_ACC_METHOD", "match-expected")
    batch, block, drafts, logits = make_step(sampling_info([1.0] * 3), 3)
    accepted = accept(make_acceptor(simulated=length), batch, block, logits)
    assert accepted.num_correct.tolist() == [length - 1] * 3
    assert torch.equal(accepted.bonus, logits.argmax(-1).view(3, WIDTH)[:, length - 1])


@pytest.mark.parametrize("factor", [1.0, 0.7], ids=lambda f: f"tau{f}")
def test_draft_inputs(factor: float) -> None:
    """A request drafts at a factor of its temperature: the argmax when greedy, no division by
    zero."""
    info = sampling_info([0.7, 1.0, 0.0], top_ks=[NO_TOP_K, 1, NO_TOP_K])
    batch, *_ = make_step(info, 3)
    anchors, greedy = torch.tensor([7, 8, 9]), DraftInputs.greedy(4, "cpu")

    def inputs_of(batch: SimpleNamespace) -> DraftInputs:
        worker = FlashMapWorker.__new__(FlashMapWorker)
        worker._greedy_inputs = greedy
        worker.serve = dataclasses.replace(make_acceptor()._serve, draft_temperature=factor)
        rules = StepRules.of(batch, worker.serve)
        return worker._draft_inputs(batch, anchors, rules)

    inputs = inputs_of(batch)
    torch.testing.assert_close(inputs.temperatures, torch.tensor([0.7 * factor, 0.0, 1e-5]))
    assert torch.equal(inputs.anchors, anchors)
    assert torch.equal(inputs.seq_lens, batch.seq_lens)
    assert inputs.rows.tolist() == [4, 0, 2] and inputs.active.tolist() == [1, 1, 1]
    assert inputs.seq_lens.dtype == inputs.rows.dtype == torch.int64

    torch.testing.assert_close(
        inputs.filters, torch.tensor([[NO_TOP_K, 0, 0], [1, 0, 0], [NO_TOP_K, 0, 0]]).float()
    )
    batch.sampling_info = sampling_info([1.0] * 3, top_ps=[0.9, 1.0, 0.5], min_ps=[0.0, 0.2, 0.1])
    filters = inputs_of(batch).filters
    torch.testing.assert_close(filters, torch.tensor([[0, 0.9, 0], [0, 0, 0.2], [0, 0.5, 0.1]]))

    batch.sampling_info = None
    inputs = inputs_of(batch)
    assert inputs.temperatures.tolist() == [0.0] * 3 and not inputs.filters.any()


@pytest.mark.parametrize(
    "logits_processor, config, expected",
    [
        (None, {}, 1.0),
        (SimpleNamespace(logit_scale=None), {}, 1.0),
        (SimpleNamespace(logit_scale=0.125), {}, 0.125),
        (None, dict(logits_mup_width_multiplier=4.0), 0.25),
    ],
    ids=["none", "plain", "granite", "mup"],
)
def test_logit_scale_of_the_target(logits_processor, config: dict, expected: float) -> None:
    target = SimpleNamespace(logits_processor=logits_processor)
    assert logit_scale(target, SimpleNamespace(**config)) == expected


def test_targets_without_hidden_states_are_refused() -> None:
    """Gemma 2, Granite and others, whose models upstream does not let hand them out."""

    class Gemma2ForCausalLM:
        pass

    worker = FlashMapWorker.__new__(FlashMapWorker)
    worker.model_runner = SimpleNamespace(model=Gemma2ForCausalLM())
    with pytest.raises(ValueError, match="hidden states of a Gemma2ForCausalLM target; serve"):
        worker._attach_target()
