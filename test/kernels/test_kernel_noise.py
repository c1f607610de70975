"""uniform_noise and gaussian_noise: moments and independence, kernel against reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.noise import gaussian_noise, uniform_noise

SEEDS = torch.tensor([0, -1, 2**40, 7])
OFFSETS = torch.tensor([3, 2**33, -9, 3])


@pytest.mark.parametrize("width", [1, 6, 1030])
@pytest.mark.parametrize("name", ["uniform_noise", "gaussian_noise"])
def test_kernel_draws_the_references_numbers(name: str, width: int, launch: Callable) -> None:
    expected = {"uniform_noise": uniform_noise, "gaussian_noise": gaussian_noise}[name](
        SEEDS, OFFSETS, width, 2
    )
    actual = launch(f"noise.{name}", SEEDS, OFFSETS, width, 2)
    atol = 0 if name == "uniform_noise" else 1e-5
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "draw, mean, std",
    [(uniform_noise, 0.5, 12**-0.5), (gaussian_noise, 0.0, 1.0)],
    ids=["uniform", "gaussian"],
)
def test_moments_and_independence(draw: Callable, mean: float, std: float) -> None:
    width = 100_000
    rows = [draw(SEEDS, OFFSETS, width, stream) for stream in (2, 3)]
    normed = (torch.cat(rows).double() - mean) / std
    # Five standard errors; neighbours within a quad come out of one Philox call.
    error = 5 / width**0.5
    correlations = normed @ normed.T / width - torch.eye(len(normed))
    assert (normed.mean(1).abs() < error).all()
    assert (correlations.abs() < 2 * error).all()
    assert ((normed[:, 1:] * normed[:, :-1]).mean(1).abs() < error).all()
