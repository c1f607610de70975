"""The flow's times and noise, the loss through the frozen head, and the three objectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from train import vocabulary_loss
from train.draws import Draws
from train.network import Blocks
from train.noise import noise_embedding, noise_factor, noised, read_state
from train.objectives import Example, Map, first_jump_share
from train.times import clock, jump_grids
from train.vocabulary_loss import Heads, Tokens
from training_runs import curves

# The grids in the config of the published drafts, V = 151936.
PUBLISHED = {
    "1": [0.0, 1.0],
    "2": [0.0, 0.8172569274902344, 1.0],
    "3": [0.0, 0.8010796308517456, 0.8310279846191406, 1.0],
    "4": [0.0, 0.7906050682067871, 0.8172569274902344, 0.8379518389701843, 1.0],
}


def test_clock_reproduces_the_published_grids() -> None:
    grids = jump_grids(151936)
    assert {n: pytest.approx(grid, abs=1e-6) for n, grid in grids.items()} == PUBLISHED


def test_clock_is_the_share_of_slots_read_off_correctly() -> None:
    vocab, time = 50, 0.6
    generator = torch.Generator().manual_seed(0)
    state = (1 - time) * torch.randn(20000, vocab, generator=generator)
    state[:, 0] += time
    wrong = float((state.argmax(-1) != 0).double().mean())
    import numpy as np

    expected = 1 - vocab / (vocab - 1) * wrong
    assert float(clock(np.array([time]), vocab)[0]) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("rank", [8, 3], ids=["full-rank", "singular"])
def test_noise_embedding_has_the_covariance_of_noise_times_embedding(rank: int) -> None:
    torch.manual_seed(0)
    embedding = torch.randn(40, rank) @ torch.randn(rank, 8)
    factor = noise_factor(embedding)
    gram = embedding.T @ embedding
    torch.testing.assert_close(factor @ factor.T, gram, atol=2e-3, rtol=1e-4)
    drawn = noise_embedding((40000,), factor, torch.Generator().manual_seed(1))
    assert float((drawn.T @ drawn / 40000 - gram).norm() / gram.norm()) < 0.05


TARGETS = ["tokens", "head", "mixed-heads"]


def targets(kind: str, rows: int, head: nn.Linear) -> tuple[Tokens | Heads, torch.Tensor]:
    """A target of `rows` rows and its distributions `(rows, V)`."""
    if kind == "tokens":
        ids = torch.randint(head.out_features, (rows,))
        return Tokens(ids), nn.functional.one_hot(ids, head.out_features).float()
    first, second, share = (*torch.randn(2, rows, head.in_features), torch.rand(rows))
    wanted = head(first).softmax(-1)
    if kind == "head":
        return Heads(first), wanted
    mixed = share[:, None] * wanted + (1 - share[:, None]) * head(second).softmax(-1)
    return Heads(first, second, share), mixed


@pytest.mark.parametrize("kind", TARGETS)
def test_loss_and_gradient_equal_autograd(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(vocabulary_loss, "_CHUNK_NUMBERS", 4 * 23)  # chunks of 4 of 10 rows
    head = nn.Linear(6, 23).requires_grad_(False)
    hidden, weights = torch.randn(10, 6, requires_grad=True), torch.rand(10)
    target, wanted = targets(kind, 10, head)
    loss = vocabulary_loss.cross_entropy(hidden, weights, head, target)
    (3 * loss).backward()
    twin = hidden.detach().clone().requires_grad_()
    expected = (weights * nn.functional.cross_entropy(head(twin), wanted, reduction="none")).sum()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(hidden.grad, twin.grad)


_KERNEL = """
import torch
from train import softmax_gradient
softmax_gradient._BLOCK = 16  # several blocks a row, the last not full
given = torch.load({path!r})
logits, weights = given.pop("logits"), given.pop("weights")
loss = softmax_gradient.softmax_gradient(logits, weights, 8.0, **given)
torch.save((loss, logits), {path!r} + ".got")
"""


@pytest.mark.parametrize("kind", TARGETS)
def test_kernel_gives_the_loss_and_leaves_the_gradient(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    vocab, rows = 53, 5
    head = nn.Linear(6, vocab).requires_grad_(False)
    target, wanted = targets(kind, rows, head)
    logits, weights = 3 * torch.randn(rows, vocab), torch.rand(rows)
    given = {"logits": logits.clone(), "weights": weights}
    if kind == "tokens":
        given["ids"] = target.ids
    else:
        given["first"] = head(target.first)
        if target.second is not None:
            given |= {"second": head(target.second), "share": target.share}
    torch.save(given, tmp_path / "given")
    code = _KERNEL.format(path=str(tmp_path / "given"))
    scripts = str(Path(vocabulary_loss.__file__).parents[1])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": scripts}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    twin = logits.double().requires_grad_()
    expected = weights * nn.functional.cross_entropy(twin, wanted.double(), reduction="none")
    (8.0 * expected).sum().backward()
    loss, gradient = torch.load(tmp_path / "given.got")
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), twin.grad, atol=1e-5, rtol=1e-5)


def test_first_jump_share_composes_jumps() -> None:
    x, first, second = torch.randn(3, 5, dtype=torch.float64)

    def jump(state, delta, s, t):
        return ((1 - t) * state + (t - s) * delta) / (1 - s)

    for times in [(0.1, 0.4, 0.9), (0.0, 0.8, 1.0), (0.2, 0.2, 0.7)]:
        s, u, t = torch.tensor(times, dtype=torch.float64)
        share = first_jump_share(s, u, t)
        mixed = share * first + (1 - share) * second
        composed = jump(jump(x, first, s, u), second, u, t)
        torch.testing.assert_close(jump(x, mixed, s, t), composed)
    same = torch.tensor(0.3)
    assert float(first_jump_share(same, same, same)) == 1.0


def test_map_draws_ordered_times_and_lets_long_jumps_in() -> None:
    objective = object.__new__(Map)
    objective._vocab, objective._one_jump, objective._diagonal = 320, 0.5, 0.25
    shape = (100, 40)
    s, u, t = objective.times(shape, Draws(0, 0), progress=1.0)
    assert bool((s <= u).all() and (u <= t).all())
    share = ((s == 0) & (t == 1)).double().mean()
    assert float(share) == pytest.approx(0.5, abs=0.03)
    assert float((s == t).double().mean()) == pytest.approx(0.25, abs=0.03)
    s, u, t = objective.times(shape, Draws(0, 0), progress=0.0)
    assert not bool((t == 1).any())


@pytest.mark.parametrize("stage", ["flow", "one-jump"])
def test_loss_falls(stage: str, trained) -> None:
    losses = curves(trained(stage))["loss"]
    assert losses[-1][1] < 0.5 * losses[0][1]


def test_map_loss_falls_and_its_jump_is_accepted(trained) -> None:
    found = curves(trained("map"))
    losses = [loss for _, loss in found["loss"]]
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
    assert found["accept_length"][-1][1] > 3.0  # of 5


class _Reader:
    """What objectives read of a target."""

    def __init__(self, vocab: int, hidden: int) -> None:
        self.embedding = torch.randn(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab).requires_grad_(False)
        self.factor = noise_factor(self.embedding)


def test_map_loss_is_the_semigroup_teachers_cross_entropy(monkeypatch) -> None:
    torch.manual_seed(0)
    vocab, hidden, shape = 19, 8, (2, 5, 3)
    monkeypatch.setattr(vocabulary_loss, "_CHUNK_NUMBERS", 7 * vocab)
    reader = _Reader(vocab, hidden)
    mixers = [nn.Linear(2 * hidden + 2, hidden).requires_grad_(False) for _ in range(3)]

    def network(mixer):
        def call(posterior, linear, start, end, blocks):
            times = torch.stack([start, end], -1)[:, :, None].expand(*linear.shape[:3], 2)
            return mixer(torch.cat([posterior.expand_as(linear), linear, times], -1))

        return call

    student, teacher, flow = (network(mixer) for mixer in mixers)
    labels = torch.randint(vocab, shape)
    labels[0, 1, 1:] = -1
    blocks = Blocks(torch.zeros(2, 4, 1), torch.zeros(2, 5, dtype=torch.int64), torch.zeros(1))
    example = Example(blocks, labels, torch.zeros(0))
    objective = Map(reader, teacher, flow, decay=2.0, one_jump=0.4, diagonal=0.3)
    draws = Draws(3, 11)
    got = objective.loss(student, example, draws, progress=1.0)

    s, u, t = objective.times(shape[:2], draws, 1.0)
    rows = vocabulary_loss.chunk_rows(vocab)
    flat, at = labels.clamp_min(0).flatten(), s[..., None].expand(shape).flatten()
    state = torch.cat(
        [
            noised(flat[i : i + rows], at[i : i + rows], vocab, draws.generator("cpu", "state", i))
            for i in range(0, len(flat), rows)
        ]
    ).view(*shape, vocab)

    def delta(net, state, start, end):
        times = start[..., None].expand(shape).flatten()
        terms = read_state(state.flatten(0, 2), times, reader.embedding)
        terms = [term.view(*shape, hidden) for term in terms]
        return reader.lm_head(net(*terms, start, end, None)).log_softmax(-1)

    first = torch.where(
        (s == t)[..., None, None], delta(flow, state, s, s), delta(teacher, state, s, u)
    ).exp()
    s_, u_, t_ = (time[..., None, None] for time in (s, u, t))
    landed = ((1 - u_) * state + (u_ - s_) * first) / (1 - s_)
    share = first_jump_share(s_, u_, t_)
    wanted = share * first + (1 - share) * delta(teacher, landed, u, t).exp()
    losses = -(wanted * delta(student, state, s, t)).sum(-1)
    weights = torch.exp(-torch.arange(3) / 2.0) * (labels >= 0)
    expected = (weights * losses).sum() / weights.sum()
    kinds = {"diagonal": (s == t).any(), "whole": (t == 1).any(), "part": ((s > 0) & (s < t)).any()}
    assert all(map(bool, kinds.values())), kinds
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
