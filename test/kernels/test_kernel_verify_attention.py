"""verify_attention: reference and kernel against float64, over cuts, shapes, masks and features."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.verify_mask_bits import pack_verify_mask, words_a_row
from sglang.kernels.ops.attention.verify_splitkv_gqa import (
    Tiles,
    choose_tiles,
    scratch_bytes,
    verify_attention,
)

OP = "sglang.kernels.ops.attention.verify_splitkv_gqa.verify_attention"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# One request without a prefix, one shorter than a tile, one on and one off a tile's border.
PREFIXES, LENGTHS = [40, 0, 3, 32], [5, 7, 1, 6]
SMALL, LARGE = Tiles(16, 16, 4, 1, 1, 1), Tiles(32, 16, 4, 1, 1, 1)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": dict(logit_cap=2.0),
    "window": dict(window=4),
    "sinks": dict(sinks=torch.linspace(-2, 3, 4)),
    "all": dict(logit_cap=2.0, window=3, sinks=torch.linspace(-2, 3, 4)),
}


def random_masks(batch: int, length: int) -> torch.Tensor:
    """Ancestors-and-itself of random trees, ``(B, L, L)``."""
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        for node in range(length):
            if node:
                mask[b, node] = mask[b, torch.randint(node, ())]
            mask[b, node, node] = True
    return mask


def packed(mask: torch.Tensor) -> torch.Tensor:
    batch, length, _ = mask.shape
    words = torch.full((batch, length, words_a_row(length)), -1)
    pack_verify_mask(mask, words)
    return words


def make_args(
    dtype: torch.dtype = torch.float32,
    prefixes: list[int] = PREFIXES,
    lengths: list[int] = LENGTHS,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    v_head_dim: int = 32,
    tree: bool = True,
    pool_dtype: torch.dtype | None = None,
) -> list[Any]:
    tokens, length = sum(lengths), max(lengths)
    q = torch.randn(tokens, heads, head_dim).to(dtype)
    k = torch.randn(tokens, kv_heads, head_dim).to(dtype)
    v = torch.randn(tokens, kv_heads, v_head_dim).to(dtype)
    slots = sum(prefixes) + 9
    key_buffer = torch.randn(slots, kv_heads, head_dim).to(pool_dtype or dtype)
    value_buffer = torch.randn(slots, kv_heads, v_head_dim).to(pool_dtype or dtype)
    out = torch.full((tokens, heads, v_head_dim), float("nan")).to(dtype)
    qo_indptr, kv_indptr = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, prefixes))
    # A captured graph's buffers hold more than this batch.
    kv_indices = torch.cat((torch.randperm(slots)[: sum(prefixes)], torch.full((5,), slots + 99)))
    mask = packed(random_masks(len(lengths), length)) if tree else None
    return [q, k, v, out, key_buffer, value_buffer, qo_indptr, kv_indptr, kv_indices, mask, length]


def exact(
    args: list[Any],
    scale: float = 0.3,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    window: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64, one query row at a time over the keys it sees."""
    q, k, v, out, key_buffer, value_buffer, qo_indptr, kv_indptr, kv_indices, mask, length = args
    batch, group = len(qo_indptr) - 1, q.shape[1] // k.shape[1]
    sees = torch.ones(batch, length, length, dtype=torch.bool).tril()
    if mask is not None:
        for j in range(length):
            sees[:, :, j] = mask[:, :, j // 64] >> (j % 64) & 1
    result = torch.zeros(out.shape, dtype=torch.float64)
    for b in range(batch):
        first, last = int(qo_indptr[b]), int(qo_indptr[b + 1])
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        prefix = len(slots)
        depth = sees[b].sum(1) - 1
        for i in range(last - first):
            drafts = [j for j in range(last - first) if sees[b, i, j]]
            if window > 0:
                drafts = [j for j in drafts if depth[i] - depth[j] <= window]
                near = slots[max(0, prefix + int(depth[i]) - window) :]
            else:
                near = slots
            rows = [first + j for j in drafts]
            all_k = torch.cat((key_buffer[near].double() * k_scale, k[rows].double()))
            all_v = torch.cat((value_buffer[near].double() * v_scale, v[rows].double()))
            for head in range(q.shape[1]):
                scores = all_k[:, head // group] @ q[first + i, head].double() * scale
                if logit_cap:
                    scores = logit_cap * torch.tanh(scores / logit_cap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                probs = scores.softmax(0)[: len(all_v)]
                result[first + i, head] = probs @ all_v[:, head // group]
    return result


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 32 float32, 4 half-precision epsilons."""
    tolerance = (32 if actual.dtype == torch.float32 else 4) * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def run(launch_and_args: Callable, args: list[Any], scale: float = 0.3, **options: Any):
    return launch_and_args(OP, *args, scale, **options)[1][3]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(dtype: str, tree: bool, feature: str, launch_and_args: Callable) -> None:
    args = make_args(DTYPES[dtype], tree=tree)
    expected = exact(args, **FEATURES[feature])
    verify_attention(*args, 0.3, **FEATURES[feature])
    assert_near(args[3], expected)
    tiles, programs = (LARGE, 5) if tree else (SMALL, 3)
    assert_near(
        run(launch_and_args, args, tiles=tiles, programs=programs, **FEATURES[feature]), expected
    )


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, v_head_dim",
    [
        (2, 2, 64, 64),
        (6, 2, 80, 80),
        (5, 1, 96, 64),
        (16, 1, 64, 128),
        (7, 1, 192, 128),
        (4, 2, 256, 256),
    ],
    ids=["G1-D64", "G3-D80", "G5-D96-Dv64", "G16-Dv128", "G7-D192-Dv128", "G2-D256"],
)
def test_shapes(
    heads: int, kv_heads: int, head_dim: int, v_head_dim: int, launch_and_args: Callable
) -> None:
    """Tiles and programs as the launcher chooses them, and two row blocks."""
    args = make_args(torch.bfloat16, [20, 70], [3, 9], heads, kv_heads, head_dim, v_head_dim)
    expected = exact(args, scale=head_dim**-0.5)
    verify_attention(*args, head_dim**-0.5)
    assert_near(args[3], expected)
    assert_near(run(launch_and_args, args, head_dim**-0.5), expected)
    assert_near(run(launch_and_args, args, head_dim**-0.5, tiles=LARGE, programs=4), expected)


@pytest.mark.parametrize("seed", range(6))
def test_cuts_fall_anywhere(seed: int, launch_and_args: Callable) -> None:
    """Prefixes from nothing to many tiles; runs of any length, also more programs than tiles."""
    draw = random.Random(seed)
    batch = draw.randint(1, 5)
    prefixes = [draw.choice((0, 1, 15, 16, 17, draw.randint(0, 300))) for _ in range(batch)]
    lengths = [draw.randint(1, 6) for _ in range(batch)]
    args = make_args(torch.float32, prefixes, lengths, head_dim=16, v_head_dim=16)
    tiles = draw.choice((SMALL, LARGE))._replace(min_tiles=draw.randint(1, 3))
    actual = run(launch_and_args, args, tiles=tiles, programs=draw.choice((1, 2, 7, 25)))
    assert_near(actual, exact(args))


@pytest.mark.parametrize("programs", [3, 8, 9], ids="{}-programs".format)
def test_units_that_are_padded_to_runs(programs: int, launch_and_args: Callable) -> None:
    """Four units of 5 tiles: no run goes over with 8 programs (3 tiles) or 9, but does with 3."""
    args = make_args(torch.float32, [72, 72], [5, 8], head_dim=16, v_head_dim=16)
    assert_near(run(launch_and_args, args, tiles=SMALL, programs=programs), exact(args))


def test_one_huge_prefix_among_tiny_ones_is_shared(launch_and_args: Callable) -> None:
    """The huge one is cut into more runs than the merge takes at a time; tiny ones are whole."""
    args = make_args(torch.float32, [2, 1040, 0, 5], [2, 3, 2, 1], 2, 1, 16, 16)
    assert_near(run(launch_and_args, args, tiles=SMALL, programs=70), exact(args))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_float8_pool_with_scales(tree: bool, launch_and_args: Callable) -> None:
    args = make_args(torch.bfloat16, tree=tree, pool_dtype=torch.float8_e4m3fn)
    scales = dict(k_scale=0.5, v_scale=1.5)
    expected = exact(args, **scales)
    verify_attention(*args, 0.3, **scales)
    assert_near(args[3], expected)
    assert_near(run(launch_and_args, args, tiles=LARGE, programs=5, **scales), expected)


def test_strided_queries_and_int32_slots(launch_and_args: Callable) -> None:
    args = make_args()
    tokens = args[0].shape[0]
    qkv = torch.randn(tokens, 8, 32)
    args[0], args[1], args[2] = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    args[8] = args[8].int()
    expected = exact(args)
    verify_attention(*args, 0.3)
    assert_near(args[3], expected)
    assert_near(run(launch_and_args, args, tiles=SMALL, programs=4), expected)


@pytest.mark.parametrize("feature", ["plain", "window"])
def test_more_drafts_than_a_word_has_bits(feature: str, launch_and_args: Callable) -> None:
    args = make_args(torch.float32, [20, 0], [70, 3], 2, 1, 16, 16)
    expected = exact(args, **FEATURES[feature])
    verify_attention(*args, 0.3, **FEATURES[feature])
    assert_near(args[3], expected)
    tiles = Tiles(64, 64, 4, 1, 1, 1)
    for some in (tiles, tiles._replace(block_n=32)):
        actual = run(launch_and_args, args, tiles=some, programs=3, **FEATURES[feature])
        assert_near(actual, expected)


def test_siblings_share_a_position_of_the_window(launch_and_args: Callable) -> None:
    """Six children of one root are all one step from it: a window of 1 shows each the last prefix
    token only to the root."""
    args = make_args(torch.float32, [9], [7], tree=True)
    star = torch.eye(7, dtype=torch.bool)
    star[:, 0] = True
    args[9] = packed(star[None])
    expected = exact(args, window=1)
    assert_near(run(launch_and_args, args, tiles=SMALL, programs=2, window=1), expected)
    args[5][:] = 0
    seen = exact(args, window=1)
    assert seen[0].abs().sum() < expected[0].abs().sum() and torch.equal(seen[1:], expected[1:])


def test_no_draft_tokens(launch_and_args: Callable) -> None:
    args = make_args(prefixes=[], lengths=[0], tree=False)
    args[6] = args[7] = torch.zeros(1, dtype=torch.int32)
    assert run(launch_and_args, args).shape == (0, 4, 32)


def test_scratch_is_bounded_by_the_device_and_not_by_the_batch() -> None:
    tiles = choose_tiles(17 * 4, 128, 128, torch.bfloat16)
    assert tiles.block_m == 128
    assert choose_tiles(65 * 4, 128, 128, torch.bfloat16).block_m == 64  # 260 rows, five times
    assert scratch_bytes(68, 128, tiles, torch.device("cpu"), 132) == 2 * 132 * 128 * 129 * 4


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10], ids=["Ada", "A100", "H100"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("rows", [4, 17, 64, 68, 260])
def test_tiles_fit_in_shared_memory(rows: int, dims: tuple[int, int], shared: int) -> None:
    tiles = choose_tiles(rows, *dims, torch.bfloat16, shared)
    key, value = (1 << (dim - 1).bit_length() for dim in dims)
    # Stages of keys and values, queries, and probabilities and indices that pass through.
    taken = 2 * (tiles.num_stages * tiles.block_n * (key + value) + tiles.block_m * key)
    assert taken + 2 * tiles.block_m * tiles.block_n <= shared


@pytest.mark.cuda
@pytest.mark.parametrize("length", [17, 65])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_full_size_in_a_graph_with_other_lengths(tree: bool, length: int) -> None:
    """Captured for one batch, replayed for another, of Qwen3-8B's heads."""
    prefixes = [3000, 1, 0, 700]
    args = make_args(torch.bfloat16, prefixes, [length] * 4, 32, 8, 128, 128, tree)
    args = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
    verify_attention(*args, 128**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_attention(*args, 128**-0.5)
    args[7].copy_(torch.tensor([0, *reversed(prefixes)]).cumsum(0))
    graph.replay()
    on_host = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
    assert_near(on_host[3], exact(on_host, 128**-0.5))
