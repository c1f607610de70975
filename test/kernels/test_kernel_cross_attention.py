"""paged_cross_attention: reference and kernel against float64 over ragged, scattered contexts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.cross_attention import paged_cross_attention
from sglang.kernels.ops.speculative.flashmap.norm import rms_norm_rope
from sglang.kernels.ops.speculative.flashmap.rope import rope_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["fp32", "bf16", "fp16"]
LENS = [150, 0, 1, 64, 257]


def make_args(
    dtype: torch.dtype,
    queries: int = 5,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    pool_dtype: torch.dtype | None = None,
    lens: list[int] = LENS,
) -> tuple[torch.Tensor, ...]:
    batch, pool_slots, width = len(lens), 700, 300
    q = torch.randn(batch, queries, heads, head_dim).to(dtype)
    keys, values = torch.randn(2, pool_slots, kv_heads, head_dim).to(pool_dtype or dtype)
    # Rows of req_to_token are permuted and hold slots no request may read past its length.
    table = torch.stack([torch.randperm(pool_slots)[:width] for _ in range(batch + 2)])
    rows = torch.randperm(batch + 2)[:batch]
    return q, keys, values, table.int(), rows, torch.tensor(lens)


def exact_attention(q, keys, values, table, rows, lens) -> torch.Tensor:
    group = q.shape[2] // keys.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, length in enumerate(lens.tolist()):
        slots = table[rows[b], :length].long()
        k, v = (x.float()[slots].double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,nhd->hqn", q[b].double(), k) / q.shape[-1] ** 0.5
        out[b] = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v)
    return out


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = (32 if actual.dtype == torch.float32 else 4) * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", [1, 3], ids=["one-pass", "split"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_ragged_lengths(dtype: torch.dtype, splits: int, launch: Callable) -> None:
    args = make_args(dtype)
    expected = exact_attention(*args)
    assert_near(paged_cross_attention(*args), expected)
    actual = launch("cross_attention.paged_cross_attention", *args, splits=splits)
    assert_near(actual, expected)
    assert not actual[LENS.index(0)].any()


@pytest.mark.parametrize(
    "queries, heads, kv_heads, head_dim",
    [(3, 8, 2, 96), (40, 2, 1, 64), (130, 1, 1, 64), (1, 2, 2, 128)],
    ids=["gqa4-D96", "mqa-Q40", "two-query-tiles", "Q1-D128"],
)
@pytest.mark.parametrize("splits", [1, 2], ids=["one-pass", "split"])
def test_shapes(
    queries: int, heads: int, kv_heads: int, head_dim: int, splits: int, launch: Callable
) -> None:
    args = make_args(torch.bfloat16, queries, heads, kv_heads, head_dim, lens=[90, 200])
    expected = exact_attention(*args)
    assert_near(paged_cross_attention(*args), expected)
    assert_near(launch("cross_attention.paged_cross_attention", *args, splits=splits), expected)


@pytest.mark.parametrize("splits", [1, 3], ids=["one-pass", "split"])
@pytest.mark.parametrize("kv_heads, head_dim", [(2, 64), (1, 96)], ids=["D64", "gqa2-D96"])
def test_normed_and_rotated_on_the_way(
    kv_heads: int, head_dim: int, splits: int, launch: Callable
) -> None:
    """The same as norm, rotation and attention one after another."""
    q, *context = make_args(torch.bfloat16, 5, 2, kv_heads, head_dim)
    weight = torch.rand(head_dim)
    rope = rope_table(torch.randint(500, (q.shape[0] * q.shape[1],)), head_dim, 10_000.0)
    rotated = rms_norm_rope(q.flatten(0, 1), weight, rope, 1e-5).view(q.shape)
    expected = exact_attention(rotated, *context)
    norm = (None, weight, rope, 1e-5)
    assert_near(paged_cross_attention(q, *context, *norm), expected)
    actual = launch("cross_attention.paged_cross_attention", q, *context, *norm, splits=splits)
    assert_near(actual, expected)


def test_split_count_follows_the_shapes_and_not_the_lengths(launch: Callable) -> None:
    """More splits than a short context has tiles: the idle ones must not count in the merge."""
    args = make_args(torch.float32, lens=[10, 100, 0])
    actual = launch("cross_attention.paged_cross_attention", *args, splits=7)
    assert_near(actual, exact_attention(*args))


def test_strided_queries_and_int32_lengths(launch: Callable) -> None:
    q, *rest, rows, lens = make_args(torch.float32, lens=[70, 30])
    wide = torch.randn(*q.shape[:2], 3 * q.shape[2], q.shape[3])
    q = wide[:, :, 2:4]
    args = (q, *rest, rows.int(), lens.int())
    expected = exact_attention(*args)
    assert_near(paged_cross_attention(*args), expected)
    assert_near(launch("cross_attention.paged_cross_attention", *args), expected)


def test_float8_pool(launch: Callable) -> None:
    args = make_args(torch.bfloat16, pool_dtype=torch.float8_e4m3fn, lens=[90, 200])
    expected = exact_attention(*args)
    assert_near(paged_cross_attention(*args), expected)
    assert_near(launch("cross_attention.paged_cross_attention", *args, splits=2), expected)


def test_other_pool_dtypes_are_refused(launch: Callable) -> None:
    args = make_args(torch.bfloat16, pool_dtype=torch.float8_e5m2, lens=[9])
    with pytest.raises(ValueError, match="--speculative-draft-kv-cache-dtype"):
        launch("cross_attention.paged_cross_attention", *args)


@pytest.mark.cuda
def test_slots_past_two_to_the_31_elements(launch: Callable) -> None:
    pool = torch.empty(2**31 // 64 + 8, 1, 64, dtype=torch.bfloat16, device="cuda")
    q, keys, values, _, _, lens = make_args(torch.bfloat16, 4, 1, 1, lens=[6])
    pool[-6:] = keys[:6].cuda()
    table = torch.arange(pool.shape[0] - 6, pool.shape[0], dtype=torch.int32)[None]
    args = (
        q,
        keys[:6],
        keys[:6],
        torch.arange(6, dtype=torch.int32)[None],
        torch.zeros(1).long(),
        lens,
    )
    actual = launch("cross_attention.paged_cross_attention", q, pool, pool, table, *args[4:])
    assert_near(actual, exact_attention(*args))


def test_arrival_counters_are_left_at_zero(launch: Callable) -> None:
    """A second launch, with another number of splits, finds the counters as the first one did."""
    args = make_args(torch.float32, lens=[150, 64, 257])
    for splits in (5, 2, 5):
        actual = launch("cross_attention.paged_cross_attention", *args, splits=splits)
        assert_near(actual, exact_attention(*args))
