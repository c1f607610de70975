"""quantize_rows and fp8_linear: kernel against reference, products against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.fp8_linear import fp8_linear, quantize_rows
from sglang.kernels.ops.speculative.flashmap.skinny_linear import MAX_ROWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_quantize_rows(dtype: torch.dtype, launch: Callable) -> None:
    x = (torch.randn(6, 130) * torch.logspace(-4, 4, 6)[:, None]).to(dtype)
    x[3] = 0
    reference, kernel = quantize_rows(x), launch("fp8_linear.quantize_rows", x)
    for quantized, scale in (reference, kernel):
        assert quantized.dtype == torch.float8_e4m3fn and scale[3] == 1
        assert (quantized.float().abs().amax(1) == 448)[[0, 1, 2, 4, 5]].all()
        restored = quantized.double() * scale[:, None]
        # Half a step of three mantissa bits, and of the smallest subnormal.
        bound = x.double().abs() * 2**-4 + scale[:, None] * 2**-10
        assert ((restored - x.double()).abs() <= bound * (1 + 1e-6)).all()
    torch.testing.assert_close(kernel[1], reference[1], rtol=1e-6, atol=0)
    assert (kernel[0].float() != reference[0].float()).float().mean() < 0.01


@pytest.mark.parametrize("rows", [16, MAX_ROWS + 1])
def test_fp8_linear(rows: int) -> None:
    x, wide = torch.randn(rows, 96).bfloat16(), torch.randn(48, 96) / 96**0.5
    bias, row_scale = torch.randn(48).bfloat16(), torch.rand(rows) + 0.5
    weight, scale = quantize_rows(wide)
    y = fp8_linear(x, weight, scale, bias, row_scale=row_scale, activation="gelu")
    if rows > MAX_ROWS:  # the tensor cores take x in e4m3 too
        quantized, x_scale = quantize_rows(x)
        x = quantized.double() * x_scale[:, None]
    product = x.double() @ (weight.double() * scale[:, None]).T
    exact = torch.nn.functional.gelu(product * row_scale[:, None] + bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=1e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [16, 100, 1024])
def test_on_fp8_tensor_cores(rows: int) -> None:
    """The device's product is the emulated one."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 tensor cores")
    x, wide = torch.randn(rows, 2048).bfloat16(), torch.randn(512, 2048) / 2048**0.5
    weight, scale = quantize_rows(wide)
    args = (x, weight, scale, torch.randn(512).bfloat16())
    expected = fp8_linear(*args, row_scale=torch.full((rows,), 0.5))
    actual = fp8_linear(*(t.cuda() for t in args), row_scale=torch.full((rows,), 0.5).cuda())
    torch.testing.assert_close(actual.cpu(), expected, rtol=2e-2, atol=2e-2)
