"""write_context_kv: every slot of every layer's pool against a slot-by-slot computation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.context_kv import write_context_kv_torch
from sglang.kernels.ops.speculative.flashmap.norm import rms_norm_rope_torch
from sglang.kernels.ops.speculative.flashmap.rope import rope_table_torch

EPS = 1e-5
LAYERS, POOL_SLOTS = 3, 11
FP8 = torch.float8_e4m3fn


def new_pool(heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows are wider than they need to be: a kernel that ignores the row stride is caught."""
    rows = torch.zeros(LAYERS, POOL_SLOTS, 2, heads, head_dim).to(dtype)
    return [layer[:, 1] for layer in rows.unbind(0)]


@pytest.mark.parametrize(
    "dtype, pool_dtype, heads, head_dim",
    [
        (torch.float32, torch.float32, 2, 64),
        (torch.bfloat16, torch.bfloat16, 2, 128),
        (torch.bfloat16, FP8, 3, 96),
        (torch.float16, torch.float16, 1, 64),
        (torch.bfloat16, torch.float32, 1, 64),
    ],
    ids=["fp32", "bf16-D128", "bf16-to-fp8-D96", "fp16", "bf16-to-fp32"],
)
@pytest.mark.parametrize("commit_lens", [None, [2, 0]], ids=["all", "committed"])
def test_write(
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    heads: int,
    head_dim: int,
    commit_lens: list[int] | None,
    launch_and_args: Callable,
) -> None:
    kv = torch.randn(6, LAYERS, 2, heads, head_dim).to(dtype)
    kv[0, :, 1] = 1000.0  # past e4m3's largest value
    k_weight = torch.rand(LAYERS, head_dim) + 0.5
    rope = rope_table_torch(torch.tensor([5, 6, 7, 100, 101, 102]), head_dim, 10_000.0)
    slots = torch.tensor([7, 3, -1, 10, 0, 4])
    written = [0, 1, 3, 4, 5] if commit_lens is None else [0, 1]

    expected = [new_pool(heads, head_dim, pool_dtype) for _ in range(2)]
    for row in written:
        for layer in range(LAYERS):
            k, v = kv[row, layer]
            k = rms_norm_rope_torch(k[None], k_weight[layer], rope[row, None], EPS)[0]
            for pool, x in zip(expected, (k, v)):
                limit = torch.finfo(pool_dtype).max
                pool[layer][slots[row]] = x.float().clamp(-limit, limit).to(pool_dtype)

    lens = None if commit_lens is None else torch.tensor(commit_lens, dtype=torch.int32)
    reference = [new_pool(heads, head_dim, pool_dtype) for _ in range(2)]
    write_context_kv_torch(kv, k_weight, rope, slots, *reference, EPS, lens)
    pools = [new_pool(heads, head_dim, pool_dtype) for _ in range(2)]
    _, args = launch_and_args(
        "context_kv.write_context_kv", kv, k_weight, rope, slots, *pools, EPS, lens
    )
    for name, want, refer, kernel in zip("kv", expected, reference, args[4:6]):
        for layer in range(LAYERS):
            assert torch.equal(refer[layer].float(), want[layer].float())
            # Keys may flip a rounding: one unit of the coarser dtype at the size of a normed key.
            unit = max(torch.finfo(t).eps for t in (dtype, pool_dtype))
            atol = 0 if name == "v" else (16 if unit < 1e-6 else 4) * unit
            torch.testing.assert_close(
                kernel[layer].float(), want[layer].float(), rtol=0, atol=atol
            )
            assert kernel[layer].float().any(-1).any(-1).sum() == len(written)


def test_an_empty_batch_writes_nothing(launch_and_args: Callable) -> None:
    kv, rope = torch.zeros(0, LAYERS, 2, 1, 64), torch.zeros(0, 32, 2)
    none = torch.zeros(0, dtype=torch.int32)
    pools = [new_pool(1, 64, torch.float32) for _ in range(2)]
    args = (kv, torch.ones(LAYERS, 64), rope, none.long(), *pools, EPS, none)
    write_context_kv_torch(*args)
    launch_and_args("context_kv.write_context_kv", *args)
    assert all(torch.equal(a, b) for a, b in zip(pools[0], new_pool(1, 64, torch.float32)))


def test_unsupported_pool_dtype_names_the_flag(launch: Callable) -> None:
    pools = [new_pool(1, 64, torch.float8_e5m2) for _ in range(2)]
    kv, rope = torch.zeros(1, LAYERS, 2, 1, 64), torch.zeros(1, 32, 2)
    with pytest.raises(ValueError, match="--speculative-draft-kv-cache-dtype"):
        launch(
            "context_kv.write_context_kv",
            kv, torch.ones(LAYERS, 64), rope, torch.zeros(1).long(), *pools, EPS,
        )  # fmt: skip
