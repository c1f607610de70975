"""skinny_linear: kernel against float64 and against eager rounding, for every way to share work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import triton
from sglang.kernels.ops.speculative.flashmap.skinny_linear import (
    Tiles,
    default_tiles,
    half_linear,
    skinny_linear,
)

TILES = {
    "one program per tile": Tiles(32, 64, 1, 1, 4, 1),
    "warps share": Tiles(16, 64, 1, 4, 4, 1),
    "programs share": Tiles(32, 32, 4, 1, 4, 1),
    "both share": Tiles(16, 64, 2, 2, 4, 1),
}


def run(
    launch: Callable, x, weight, bias, *, scale=None, row_scale=None, activation="none", tiles=None
):
    """The kernel's result, which it writes to an argument."""
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype)
    args = (x, weight, bias, scale, row_scale, activation, out, tiles and list(tiles))
    return launch("skinny_linear.skinny_linear", *args)[1][6]


def operands(rows: int, out_features: int, in_features: int, dtype: torch.dtype):
    x = torch.randn(rows, in_features).to(dtype)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    return x, weight, torch.randn(out_features).to(dtype)


def assert_rounded_once(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for values near a rounding boundary; a second rounding would show in a tenth."""
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-3)
    assert (actual != expected).float().mean() < 0.03


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize(
    "rows, out_features, in_features",
    [(16, 96, 256), (5, 40, 200), (33, 64, 128)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_skinny_linear(
    dtype, rows, out_features, in_features, tiles, launch_and_args: Callable
) -> None:
    x, weight, bias = operands(rows, out_features, in_features, dtype)
    exact = x.double() @ weight.double().T + bias.double()
    y = run(launch_and_args, x, weight, bias, tiles=tiles)
    assert y.shape == (rows, out_features) and y.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
        return
    assert_rounded_once(y, exact.to(dtype))
    activated = run(launch_and_args, x, weight, bias, activation="gelu", tiles=tiles)
    assert_rounded_once(activated, torch.nn.functional.gelu(y))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("weights", ["fp32", "bf16", "e4m3"])
def test_weights_held_whole(weights: str, splits: int, launch_and_args: Callable) -> None:
    """A program's weights are all read before ``x`` is there."""
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    x, weight, bias = operands(11, 40, 256, dtype)
    factors = {}
    if weights == "e4m3":
        weight = (8 * weight).to(torch.float8_e4m3fn)
        factors = dict(scale=torch.rand(40) + 0.5, row_scale=torch.rand(11) + 0.5)
    tiles = Tiles(16, 256 // splits, splits, 2, 2, 1, whole=1)
    y = run(launch_and_args, x, weight, bias, tiles=tiles, **factors)
    exact = x.double() @ weight.double().T
    exact = exact * factors["scale"] * factors["row_scale"][:, None] if factors else exact
    exact = exact + bias.double()
    if dtype == torch.float32:
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    else:
        assert_rounded_once(y, exact.to(dtype))


def test_skinny_linear_of_strided_rows_without_bias(launch_and_args: Callable) -> None:
    x, weight, _ = operands(7, 48, 384, torch.bfloat16)
    y = run(launch_and_args, x[:, 128:], weight[:, :256], None)
    exact = x[:, 128:].double() @ weight[:, :256].double().T
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)


def test_arrival_counters_are_left_at_zero(launch_and_args: Callable) -> None:
    """A second launch finds the counters as the first one did."""
    x, weight, bias = operands(16, 64, 256, torch.float32)
    tiles = TILES["programs share"]
    results = [run(launch_and_args, x, weight, bias, tiles=tiles) for _ in range(2)]
    assert torch.equal(*results)
    assert (results[0] - results[0].mean()).abs().max() > 0.1


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
def test_eight_bit_weights_and_row_factors(tiles: Tiles, launch_and_args: Callable) -> None:
    x, weight, bias = operands(9, 40, 192, torch.bfloat16)
    quantized = (8 * weight).to(torch.float8_e4m3fn)
    scale, row_scale = torch.rand(40) + 0.5, torch.rand(9) + 0.5
    factors = dict(scale=scale, row_scale=row_scale)
    exact = x.double() @ quantized.double().T * scale * row_scale[:, None] + bias.double()
    kernel = run(launch_and_args, x, quantized, bias, tiles=tiles, **factors)
    for y in (kernel, skinny_linear(x, quantized, bias, **factors)):
        assert_rounded_once(y, exact.to(torch.bfloat16))


@pytest.mark.parametrize("factors", [True, False], ids=["factors", "plain"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_more_rows_keep_the_product_in_16_bits(factors: bool, activation: str) -> None:
    x, weight, bias = operands(72, 40, 192, torch.bfloat16)
    scale, row_scale = (torch.rand(40) + 0.5, torch.rand(72) + 0.5) if factors else (None, None)
    exact = x.double() @ weight.double().T
    exact = exact * scale * row_scale[:, None] if factors else exact
    exact = exact + bias.double()
    exact = torch.nn.functional.gelu(exact) if activation == "gelu" else exact
    out = torch.empty(72, 40, dtype=torch.bfloat16)
    half_linear(x, weight, bias, scale, row_scale, activation, out)
    # Rounded as a product, as a sum and by the activation.
    torch.testing.assert_close(out.double(), exact, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("weight_bytes", [1, 2])
@pytest.mark.parametrize("shared", [99 << 10, 227 << 10])
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("sms", [80, 132, 148])
def test_default_tiles_fit(sms: int, rows: int, shared: int, weight_bytes: int) -> None:
    """Their scratch and tiles fit for every product of a Qwen3-8B draft; no split is empty."""
    products = [(2048, 2048), (6144, 2048), (8192, 2048), (2048, 8192), (2048, 20480), (40, 64)]
    for (n, k), moments in itertools.product(products, [False, True]):
        tiles = default_tiles(rows, n, k, sms, shared, moments, weight_bytes)
        deep = tiles.block_k * tiles.num_stages
        rows_of_x = max(16, triton.next_power_of_2(rows))
        assert deep * (tiles.block_n * weight_bytes + rows_of_x * 2) <= shared
        assert not tiles.whole or tiles.block_k * tiles.splits == k
        assert tiles.splits * n * 64 <= 1 << 20 and n <= 1024 * tiles.block_n
        share = math.ceil(math.ceil(k / tiles.block_k) / tiles.splits) * tiles.block_k
        assert (tiles.splits - 1) * share < k


def test_the_reference_is_the_eager_product() -> None:
    x, weight, bias = operands(6, 24, 32, torch.float32)
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
    assert torch.equal(skinny_linear(x, weight, bias, activation="gelu"), expected)
