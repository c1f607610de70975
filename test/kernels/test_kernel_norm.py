"""rope_table, rms_norm, rms_norm_rope: reference against the oracle, kernel against reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from flashmap.modeling_flashmap import FlashMapRMSNorm, apply_rope, rope_tables
from kernel_rounding import assert_same_rounding
from sglang.kernels.ops.speculative.flashmap.norm import (
    rms_norm,
    rms_norm_rope,
    rms_norm_rope_torch,
    rms_norm_torch,
)
from sglang.kernels.ops.speculative.flashmap.rope import rope_table, rope_table_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["fp32", "bf16", "fp16"]
EPS = 1e-5
POSITIONS = torch.tensor([0, 1, 17, 4095, 40_000])


def oracle_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = FlashMapRMSNorm(weight.numel(), EPS)
    norm.weight.data = weight
    return norm(x)


def ulps(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference in units of the last place of the larger values' dtype."""
    scale = expected.float().abs().clamp_min(1e-2) * torch.finfo(expected.dtype).eps
    return ((actual.float() - expected.float()).abs() / scale).max().item()


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_rope_table_is_the_oracles(head_dim: int, launch: Callable) -> None:
    cos, sin = rope_tables(POSITIONS[None], head_dim, 10_000.0)
    expected = torch.stack((cos, sin), dim=-1)[0, :, 0]
    table = rope_table(POSITIONS, head_dim, 10_000.0)
    assert torch.equal(table, expected)
    # Float32 angles of positions near 40,000 are good to 40,000 * 2**-24 = 2e-3 and a few ulps.
    power = 10_000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = POSITIONS[:, None].double() * power
    exact = torch.stack((angles.cos(), angles.sin()), dim=-1)
    near = POSITIONS < 5_000
    kernel = launch("rope.rope_table", POSITIONS, head_dim, 10_000.0)
    for actual in (table, kernel):
        torch.testing.assert_close(actual[near].double(), exact[near], rtol=0, atol=1e-3)
        torch.testing.assert_close(actual.double(), exact, rtol=0, atol=8e-3)


def test_rope_table_kernel_masks_rows_and_takes_int32(launch: Callable) -> None:
    positions = torch.arange(19, dtype=torch.int32)
    expected = rope_table_torch(positions, 64, 10_000.0)
    torch.testing.assert_close(launch("rope.rope_table", positions, 64, 10_000.0), expected)


@pytest.mark.parametrize("dim", [64, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rms_norm(dtype: torch.dtype, dim: int, launch: Callable) -> None:
    x = (3 * torch.randn(4, dim + 8)).to(dtype)[:, :dim]
    weight = (torch.rand(dim) + 0.5).to(dtype)
    expected = rms_norm(x, weight, EPS)
    assert torch.equal(expected, oracle_norm(x, weight))
    rms = (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    assert ulps(expected, (x.double() / rms * weight.double()).to(dtype)) < 3
    actual = launch("norm.rms_norm", x, weight, EPS)
    assert actual.is_contiguous()
    assert_same_rounding(actual, expected, rtol=8 if dtype == torch.float32 else 2, atol=0)


def test_rms_norm_rounds_the_scale_before_the_product() -> None:
    x, weight = torch.randn(64, 128).bfloat16(), torch.rand(128) + 0.5
    usual_order = torch.nn.functional.rms_norm(x.float(), (128,), weight, EPS).bfloat16()
    assert not torch.equal(rms_norm_torch(x, weight, EPS), usual_order)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rms_norm_rope(dtype: torch.dtype, head_dim: int, launch: Callable) -> None:
    heads, rows = 3, POSITIONS.numel()
    fused = torch.randn(rows, 3 * heads, head_dim).to(dtype)
    x = fused[:, heads : 2 * heads]
    weight = torch.rand(head_dim) + 0.5
    table = rope_table_torch(POSITIONS, head_dim, 10_000.0)
    expected = rms_norm_rope(x, weight, table, EPS)
    rope = rope_tables(POSITIONS[None], head_dim, 10_000.0)
    assert torch.equal(expected, apply_rope(oracle_norm(x, weight)[None], rope)[0])
    actual = launch("norm.rms_norm_rope", x, weight, table, EPS)
    assert actual.shape == x.shape and actual.is_contiguous()
    # A rotation mixes two channels, so one may come out small with the error of the other.
    assert_same_rounding(actual, expected, rtol=2, atol=16)


def test_rms_norm_rope_rotates_neighbouring_channels() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 1.0])[None, None]
    table = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])
    rotated = rms_norm_rope_torch(x, torch.ones(4), table, 0.0)
    expected = math.sqrt(2) * torch.tensor([0.0, 1.0, -1.0, 0.0])
    torch.testing.assert_close(rotated[0, 0], expected)


def test_rms_norm_rope_covers_more_heads_than_a_program(launch: Callable) -> None:
    x, weight = torch.randn(2, 18, 64), torch.ones(64)
    table = rope_table_torch(torch.tensor([3, 4]), 64, 10_000.0)
    expected = rms_norm_rope_torch(x, weight, table, EPS)
    torch.testing.assert_close(launch("norm.rms_norm_rope", x, weight, table, EPS), expected)
