"""The flow's times and noise, the loss through the frozen head, and the three objectives."""

from __future__ import annotations

import pytest
import torch
from conftest import curves
from torch import nn
from train import vocabulary_loss
from train.draws import Draws
from train.noise import noise_embedding, noise_factor
from train.objectives import Map, first_jump_share
from train.times import clock, jump_grids

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


@pytest.mark.parametrize("soft", [False, True], ids=["tokens", "distributions"])
def test_loss_and_gradient_equal_autograd(soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(vocabulary_loss, "_CHUNK_NUMBERS", 4 * 23)  # chunks of 4 of 10 rows
    head = nn.Linear(6, 23).requires_grad_(False)
    hidden, weights = torch.randn(10, 6, requires_grad=True), torch.rand(10)
    wanted = torch.randn(10, 23).softmax(-1) if soft else torch.randint(23, (10,))
    loss = vocabulary_loss.cross_entropy(hidden, weights, head, lambda part: wanted[part])
    (3 * loss).backward()
    twin = hidden.detach().clone().requires_grad_()
    expected = (weights * nn.functional.cross_entropy(head(twin), wanted, reduction="none")).sum()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(hidden.grad, twin.grad)


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


def test_map_learns_the_whole_jump_from_the_flow(trained) -> None:
    lengths = [length for _, length in curves(trained("map"))["accept_length"]]
    assert lengths[-1] > lengths[0] + 0.5
