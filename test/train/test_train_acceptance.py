"""Losses on what rejection sampling keeps, and its expectation as a measure of a draft."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_draft
from torch import nn
from train import acceptance, acceptance_loss, vocabulary_loss
from train.acceptance_loss import Terms, acceptance_value, gradient, kept, statistics, terms_loss
from train.network import Blocks
from train.noise import noise_factor
from train.objectives import Example, OneJump
from training_runs import curves, train_command

LOSSES = [("log", 1.0), ("log", 0.6), ("length", 1.0), ("length", 0.6)]
IDS = [f"{kind}-{share:g}" for kind, share in LOSSES]


def plain_loss(kind, share, log_q, log_p, ids, weights, labelled):
    """The loss as its equations read, in the inputs' dtype."""
    p, q = log_p.exp(), log_q.exp()
    overlap = torch.minimum(p, q).sum(-1)
    entropy = (weights * -(p * log_q).sum(-1)).sum()
    if kind == "log":
        lost = -(weights * overlap.log()).sum()
    else:
        at = ids[:, None]
        ratio = (q / p).gather(1, at)[:, 0].clamp_max(1.0)
        blocks, size = labelled.shape
        lost = 0.0
        for block in range(blocks):
            reached, tokens = 1.0, 1.0
            for k in range(size):
                row = block * size + k
                if labelled[block, k]:
                    tokens = tokens + reached * overlap[row]
                    reached = reached * ratio[row]
            lost = lost - tokens.log() / blocks
    return (1 - share) * entropy + share * lost


def slots(blocks: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which slots have a label, the last block being short, and weights `(n,)`."""
    labelled = torch.ones(blocks, size, dtype=torch.bool)
    labelled[-1, 1:] = False
    weights = torch.exp(-torch.arange(size) / 2.0) * labelled
    return labelled, (weights / weights.sum()).flatten()


@pytest.mark.parametrize(("kind", "share"), LOSSES, ids=IDS)
def test_loss_and_gradient_equal_autograd(kind, share, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(vocabulary_loss, "_CHUNK_NUMBERS", 7 * 23)  # chunks of 2 of 5 blocks of 3
    head = nn.Linear(6, 23).requires_grad_(False)
    hidden, known = torch.randn(15, 6, requires_grad=True), torch.randn(15, 6)
    ids, (labelled, weights) = torch.randint(23, (15,)), slots(5, 3)
    value = acceptance_value(kind, share, weights, labelled)
    loss = terms_loss(hidden, head, known, ids, 3, value)
    (3 * loss).backward()
    twin, head = hidden.detach().double().requires_grad_(), head.double()
    log_q, log_p = head(twin).log_softmax(-1), head(known.double()).log_softmax(-1)
    expected = plain_loss(kind, share, log_q, log_p, ids, weights.double(), labelled)
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), twin.grad, atol=1e-6, rtol=1e-5)


_KERNEL = """
import torch
from train import acceptance_gradient
acceptance_gradient._BLOCK = 16  # several blocks a row, the last not full
logits, known, ids, by = torch.load({path!r})
found = acceptance_gradient.acceptance_statistics(logits, known, ids)
left = acceptance_gradient.acceptance_gradient(logits, known, ids, found[3:], by, 8.0)
assert left is logits
torch.save((found, left), {path!r} + ".got")
"""


def test_kernels_give_the_statistics_and_leave_the_gradient(tmp_path, monkeypatch) -> None:
    torch.manual_seed(1)
    logits, known = 3 * torch.randn(2, 6, 53)
    known[5] = logits[5]  # a draft that is right
    ids, by = torch.randint(53, (6,)), torch.randn(3, 6).unbind()
    torch.save((logits, known, ids, by), tmp_path / "given")
    code = _KERNEL.format(path=str(tmp_path / "given"))
    scripts = str(Path(vocabulary_loss.__file__).parents[1])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": scripts}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    found, slope = torch.load(tmp_path / "given.got")

    twin = logits.double()[:5].requires_grad_()
    log_q, log_p = twin.log_softmax(-1), known[:5].double().log_softmax(-1)
    at = ids[:5, None]
    expected = (
        -(log_p.exp() * log_q).sum(-1),
        torch.minimum(log_p, log_q).exp().sum(-1),
        (log_q - log_p).gather(1, at)[:, 0],
    )
    for row, wanted in zip(found, expected):
        torch.testing.assert_close(row[:5].double(), wanted.detach(), atol=1e-5, rtol=1e-5)
    sum((8.0 * some[:5] * row).sum() for some, row in zip(by, expected)).backward()
    torch.testing.assert_close(slope[:5].double(), twin.grad, atol=1e-5, rtol=1e-5)
    assert float(found[1][5]) == pytest.approx(1.0, abs=1e-5)

    # And they are what the readable form gives, rounding aside in the row whose q and p are equal.
    plain = statistics(logits, known, ids)
    reference = (*vars(plain.terms).values(), plain.normaliser, plain.known_normaliser, plain.below)
    for row, wanted in zip(found, reference):
        torch.testing.assert_close(row[:5], wanted[:5], atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(acceptance_loss, "SCALE", 8.0)
    wanted = gradient(logits, known, ids, plain, Terms(*by))
    torch.testing.assert_close(slope[:5], wanted[:5], atol=1e-5, rtol=1e-5)


def test_kept_is_the_expectation_of_rejection_sampling() -> None:
    """Over all texts of a target with memory: what rejection does with a draft of independent
    slots, against the mean over texts that the target samples."""
    generator = torch.Generator().manual_seed(0)
    vocab, size = 3, 3
    q = torch.rand(size, vocab, generator=generator, dtype=torch.float64).softmax(-1)
    tables = [2 * torch.randn(*[vocab] * (k + 1), generator=generator) for k in range(size)]
    tables = [table.double().softmax(-1) for table in tables]
    exact, estimate, biased = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    for text in itertools.product(range(vocab), repeat=size):
        rows = [tables[k][text[:k]] for k in range(size)]
        likely = torch.stack([rows[k][text[k]] for k in range(size)]).prod()
        p = torch.stack(rows)
        common = torch.minimum(p, q)
        for k in range(size):
            # P(this prefix drafted and kept), shared by the texts that go on from it.
            chance = torch.stack([common[j, text[j]] for j in range(k + 1)]).prod()
            exact[k] += chance / vocab ** (size - 1 - k)
        log_ratio = torch.stack([(q[k, text[k]] / p[k, text[k]]).log() for k in range(size)])
        terms = Terms(torch.zeros(size), common.sum(-1), log_ratio)
        estimate += likely * kept(terms, torch.ones(1, size, dtype=torch.bool))[0]
        biased += likely * common.sum(-1).cumprod(0)
    torch.testing.assert_close(estimate, exact)
    assert float((biased - exact).abs().max()) > 1e-3


class _Reader:
    """What a draft reads of a target whose hidden states are its logits."""

    def __init__(self, vocab: int) -> None:
        self.embedding = torch.eye(vocab)
        self.lm_head = nn.Linear(vocab, vocab, bias=False).requires_grad_(False)
        self.lm_head.weight.copy_(torch.eye(vocab))
        self.factor = noise_factor(self.embedding)


def test_measure_is_the_mean_over_blocks_that_text_fills(monkeypatch) -> None:
    torch.manual_seed(0)
    vocab, size = 7, 2
    monkeypatch.setattr(vocabulary_loss, "_CHUNK_NUMBERS", 5 * vocab)  # 2 blocks at a time
    final = torch.randn(2, 6, vocab)
    drafted = torch.randn(2, 3, size, vocab)
    anchors = torch.tensor([[0, 1, 2], [1, 3, 4]])
    labels = torch.randint(vocab, (2, 3, size))
    labels[1, 2, 1] = -1
    blocks = Blocks(torch.zeros(2, 6, 1), anchors, torch.zeros(1))
    found = acceptance.measure_sampled(
        lambda *_: drafted, OneJump(_Reader(vocab), decay=1.0), [Example(blocks, labels, final)]
    )
    sums = torch.zeros(size)
    for row, place in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        reached = 1.0
        for k in range(size):
            p = final[row, anchors[row, place] + k].softmax(-1)
            q = drafted[row, place, k].softmax(-1)
            sums[k] += reached * torch.minimum(p, q).sum()
            token = labels[row, place, k]
            reached = reached * min(1.0, float(q[token] / p[token]))
    assert found.blocks == 5
    assert found.slots == pytest.approx((sums / 5).tolist(), rel=1e-5)
    assert found.length == pytest.approx(1 + float(sums.sum()) / 5, rel=1e-5)


@pytest.mark.parametrize("kind", ["log", "length"])
def test_training_for_acceptance_raises_it(kind, target, data, trained, tmp_path) -> None:
    start = trained("one-jump")
    command = train_command(target, data, tmp_path / "run", "--stage", "one-jump")
    command += ["--init", str(start / "release"), "--labels", "target", "--steps", "60"]
    command += ["--acceptance-weight", "1", "--acceptance-loss", kind, "--ema", "0.9"]
    command += ["--lr", "0.003", "--validate-every", "60"]
    assert train_draft.main(command) == 0
    runs = (start, tmp_path / "run")
    before, after = (curves(run)["sampled_accept_length"][-1][1] for run in runs)
    assert after > before
    card = (tmp_path / "run/release/README.md").read_text()
    assert "| share of the loss on what rejection keeps | 1.0 |" in card
    assert f"; sampled, T = 1: {after:.2f}." in card


def test_acceptance_needs_the_targets_distributions(target, data, tmp_path, capsys) -> None:
    command = train_command(target, data, tmp_path / "run", "--stage", "one-jump")
    assert train_draft.main([*command, "--acceptance-weight", "0.5"]) == 1
    assert "add --stage one-jump --labels target" in capsys.readouterr().err
