"""adaln: reference against the oracle's modules, kernel against reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flashmap import FlashMapConfig
from flashmap.modeling_flashmap import FlashMapAdaLayerNorm
from kernel_rounding import assert_same_rounding
from sglang.kernels.ops.speculative.flashmap.adaln import adaln

EPS = 1e-6


@pytest.mark.parametrize("with_branch", [True, False], ids=["branch", "first"])
@pytest.mark.parametrize("dim", [64, 1000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_adaln(dtype: torch.dtype, dim: int, with_branch: bool, launch: Callable) -> None:
    x, branch = torch.randn(2, 5, dim).to(dtype)
    scale, shift, gate = torch.randn(3, dim).to(dtype)
    config = FlashMapConfig(hidden_size=dim, num_attention_heads=1, layer_norm_eps=EPS)
    args = (x, branch, gate) if with_branch else (x, None, None)
    x_new, h = adaln(*args, 1 + scale, shift, EPS)
    expected = x + gate * branch if with_branch else x
    assert torch.equal(x_new, expected)
    assert torch.equal(h, FlashMapAdaLayerNorm(config)(expected, (scale, shift, gate))[0])
    if not with_branch:
        assert x_new is x

    kernel_x, kernel_h = launch("adaln.adaln", *args, 1 + scale, shift, EPS)
    if with_branch:
        assert_same_rounding(kernel_x, x_new, rtol=1, atol=1)
    else:
        assert kernel_x.numel() == 0
    # A flipped rounding of the normed value (up to 4) is scaled by up to 4.
    assert_same_rounding(kernel_h, h, rtol=2, atol=16)


def test_adaln_of_a_large_mean(launch: Callable) -> None:
    """The variance is that of centered values; E[x**2] - E[x]**2 would lose it here."""
    x = 1000 + torch.randn(3, 64)
    expected = torch.nn.functional.layer_norm(x.double(), (64,), eps=EPS).float()
    h = launch("adaln.adaln", x, None, None, torch.ones(64), torch.zeros(64), EPS)[1]
    torch.testing.assert_close(h, expected, rtol=1e-3, atol=1e-3)
