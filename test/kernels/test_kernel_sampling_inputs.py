"""sampling_inputs: what upstream's parameters mean to a draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.sampling_inputs import sampling_inputs

ALL = 1 << 30  # upstream's top-k of requests without one


def test_parameters_as_upstream_has_them(launch: Callable) -> None:
    args = (
        torch.tensor([0.7, 1.0, 0.0, 1.3]),
        torch.tensor([ALL, 1, ALL, 12], dtype=torch.int32),
        torch.tensor([0.9, 1.0, 1.0, 0.5]),
        torch.tensor([0.0, 0.2, 0.1, 0.0]),
    )
    for temperatures, filters in (
        sampling_inputs(*args, True, True, True, 1.0),
        launch("sampling_inputs.sampling_inputs", *args, True, True, True, 1.0),
    ):
        torch.testing.assert_close(temperatures, torch.tensor([0.7, 0.0, 1e-5, 1.3]))
        expected = [[ALL, 0.9, 0.0], [1, 0.0, 0.2], [ALL, 0.0, 0.1], [12, 0.5, 0.0]]
        torch.testing.assert_close(filters, torch.tensor(expected))


def test_a_factor_of_the_temperatures() -> None:
    heats, all_ks = torch.tensor([0.5, 1e-5, 2.0]), torch.tensor([ALL, ALL, 1], dtype=torch.int32)
    temperatures, _ = sampling_inputs(heats, all_ks, heats, heats, False, False, False, 0.5)
    torch.testing.assert_close(temperatures, torch.tensor([0.25, 1e-5, 0.0]))


@pytest.mark.parametrize("size", [0, 1, 130])
@pytest.mark.parametrize("kind", [None, 0, 1, 2], ids=["none", "top-k", "top-p", "min-p"])
def test_kernel_and_reference_agree(kind: int | None, size: int, launch: Callable) -> None:
    args = (
        2 * torch.rand(size),
        torch.randint(5, (size,), dtype=torch.int32),
        1.1 * torch.rand(size),
        torch.rand(size),
        *(kind == i for i in range(3)),
        0.7,
    )
    temperatures, filters = sampling_inputs(*args)
    assert not filters[:, [i for i in range(3) if i != kind]].any()
    kernel = launch("sampling_inputs.sampling_inputs", *args)
    assert torch.equal(kernel[0], temperatures) and torch.equal(kernel[1], filters)
    assert size < 130 or (temperatures == 0).any() and (temperatures > 0).any()
