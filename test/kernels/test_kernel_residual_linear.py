"""add_linear and normed_linear: references against AdaLN in float64, kernels against references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.residual_linear import add_linear, normed_linear
from sglang.kernels.ops.speculative.flashmap.skinny_linear import moments_block_n
from sglang.srt.speculative.flashmap.projection import Modulation, Projection

EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], eps=EPS)


class Branches:
    """Two branches around a residual stream of 128 channels."""

    def __init__(self, dtype: torch.dtype, rows: int, mean: float = 0.0) -> None:
        dim, width = 128, 192
        self.inner = torch.randn(rows, width).to(dtype)
        self.down = (torch.randn(dim, width) / width**0.5).to(dtype)
        self.up = (torch.randn(width, dim) / dim**0.5).to(dtype)
        self.bias, self.up_bias = torch.randn(dim).to(dtype), torch.randn(width).to(dtype)
        self.residual = (mean + torch.randn(rows, dim)).to(dtype)
        self.gate = torch.randn(dim).to(dtype)
        self.modulation = Modulation(*(1 + 0.3 * torch.randn(2, dim).to(dtype)), self.gate)

    def summed(self) -> torch.Tensor:
        """The stream after the first branch, in float64."""
        branch = self.inner.double() @ self.down.double().T + self.bias
        return self.residual + self.gate * branch

    def adaln(self, x: torch.Tensor) -> torch.Tensor:
        """What the second branch makes of ``x``, in float64."""
        h = layer_norm(x) * self.modulation.scale1 + self.modulation.shift
        return h @ self.up.double().T + self.up_bias


@DTYPES
@pytest.mark.parametrize("rows", [1, 16, 33], ids=lambda n: f"{n}-rows")
def test_two_branches(dtype: torch.dtype, rows: int, launch_and_args: Callable) -> None:
    """Each face after the other's: what one leaves for a norm the other reads."""
    branches = Branches(dtype, rows)
    product = (branches.inner, branches.down, branches.bias)
    x, moments = add_linear(*product, residual=branches.residual, gate=branches.gate)
    kernel_x, kernel_moments = launch_and_args(
        "residual_linear.add_linear", *product, None, None, branches.residual, branches.gate
    )[0]
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    assert moments.shape == (2, rows, 1)
    assert kernel_moments.shape == (2, rows, 128 // moments_block_n(rows))
    for summed in (x, kernel_x):
        assert summed.dtype == dtype and relative_error(summed, branches.summed()) < tolerance

    reader = Projection.modulated(branches.up, branches.up_bias, branches.modulation, fp8=False)
    read = (reader.weight, reader.bias, reader.column_sums, EPS)
    expected = branches.adaln(x)
    assert relative_error(normed_linear(x, moments, *read), expected) < tolerance
    assert relative_error(normed_linear(kernel_x, kernel_moments, *read), expected) < tolerance
    args = (reader.weight, reader.bias, None, reader.column_sums, EPS, "none")
    for part in (moments, kernel_moments):
        out = launch_and_args(
            "residual_linear.normed_linear", x, part, *args, torch.zeros(rows, 192, dtype=dtype)
        )[1][-1]
        assert relative_error(out, expected) < tolerance


def test_rounding_is_that_of_adaln(launch_and_args: Callable) -> None:
    """The product, the gated product and the sum are each rounded."""
    branches = Branches(torch.bfloat16, 16)
    product = (branches.inner, branches.down, branches.bias, None, None)
    stream = (branches.residual, branches.gate)
    x = launch_and_args("residual_linear.add_linear", *product, *stream)[0][0]
    branch = branches.inner.double() @ branches.down.double().T + branches.bias
    expected = branches.residual + branches.gate * branch.to(torch.bfloat16)
    assert (x != expected).float().mean() < 0.03


def test_activation_and_eight_bit_weights(launch_and_args: Callable) -> None:
    branches = Branches(torch.bfloat16, 9)
    x, moments = add_linear(branches.inner, branches.down)
    reader = Projection.modulated(branches.up, branches.up_bias, branches.modulation, fp8=True)
    assert reader.weight.dtype == torch.float8_e4m3fn
    weight = reader.weight.double() * reader.scale[:, None]
    expected = torch.nn.functional.gelu(layer_norm(x) @ weight.T + reader.bias)
    read = (reader.weight, reader.bias)
    plain = normed_linear(
        x, moments, *read, reader.column_sums, EPS, scale=reader.scale, activation="gelu"
    )
    out = torch.zeros_like(plain)
    args = (*read, reader.scale, reader.column_sums, EPS, "gelu", out)
    kernel = launch_and_args("residual_linear.normed_linear", x, moments, *args)[1][-1]
    for got in (plain, kernel):
        assert relative_error(got, expected) < 2**-7


def test_a_large_mean_keeps_the_variance(launch_and_args: Callable) -> None:
    """Parts are centered before they are squared; E[x**2] - E[x]**2 would lose the variance."""
    branches = Branches(torch.float32, 5, mean=1000.0)
    product = (branches.inner, branches.down, branches.bias, None, None, branches.residual)
    x, moments = launch_and_args("residual_linear.add_linear", *product, branches.gate)[0]
    reader = Projection.modulated(branches.up, branches.up_bias, branches.modulation, fp8=False)
    y = normed_linear(x, moments, reader.weight, reader.bias, reader.column_sums, EPS)
    assert relative_error(y, branches.adaln(x)) < 1e-3


def test_the_first_product_is_not_gated(launch_and_args: Callable) -> None:
    """The embedding of a draft's noise: factors of rows, nothing to add to."""
    branches = Branches(torch.float32, 4)
    factor = torch.rand(4) + 0.5
    product = (branches.inner, branches.down, branches.bias)
    expected = branches.inner.double() @ branches.down.double().T * factor[:, None] + branches.bias
    x, _ = add_linear(*product, row_scale=factor)
    kernel_x, moments = launch_and_args(
        "residual_linear.add_linear", *product, None, factor, None, None
    )[0]
    for got in (x, kernel_x):
        assert relative_error(got, expected) < 1e-5
    torch.testing.assert_close(moments[0].mean(dim=1), kernel_x.mean(dim=1), rtol=0, atol=1e-5)
