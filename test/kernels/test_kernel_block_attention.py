"""block_self_attention: reference against the oracle's module, both faces against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flashmap import FlashMapConfig
from flashmap.modeling_flashmap import FlashMapAttention, rope_tables
from sglang.kernels.ops.speculative.flashmap.block_attention import block_self_attention
from sglang.kernels.ops.speculative.flashmap.norm import rms_norm_rope_torch
from sglang.kernels.ops.speculative.flashmap.rope import rope_table_torch

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["fp32", "bf16", "fp16"]


def test_reference_is_the_oracles_self_attention() -> None:
    heads, head_dim, blocks, slots = 4, 16, 3, 5
    dim = heads * head_dim
    config = FlashMapConfig(hidden_size=dim, num_attention_heads=heads, qk_norm_eps=EPS)
    attention = FlashMapAttention(config)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data.uniform_(0.5, 1.5)
    attention.o_proj.weight.data = torch.eye(dim)
    x = torch.randn(blocks, slots, dim)
    positions = torch.arange(blocks * slots).view(blocks, slots)
    rope = rope_tables(positions, head_dim, 10_000.0)
    with torch.no_grad():
        expected = attention(x, rope, *attention.project_kv(x, rope))
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([projection(x) for projection in projections], dim=-1)
        table = rope_table_torch(positions.flatten(), head_dim, 10_000.0)
        weights = attention.q_norm.weight, attention.k_norm.weight
        actual = block_self_attention(qkv, *weights, table, EPS, heads)
    torch.testing.assert_close(actual.flatten(2), expected)


@pytest.mark.parametrize(
    "slots, heads, kv_heads, head_dim",
    [(16, 2, 2, 128), (1, 2, 2, 64), (7, 4, 2, 96), (33, 2, 1, 64), (64, 1, 1, 64)],
    ids=["K16-D128", "K1-D64", "K7-D96-gqa2", "K33-D64-mqa", "K64-D64"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_block_self_attention(
    dtype: torch.dtype, slots: int, heads: int, kv_heads: int, head_dim: int, launch: Callable
) -> None:
    blocks = 2
    qkv = torch.randn(blocks, slots, (heads + 2 * kv_heads) * head_dim).to(dtype)
    q_weight, k_weight = (torch.rand(2, head_dim) + 0.5).to(dtype)
    # Blocks at different positions: a kernel that reads one block's rope for all is caught.
    table = rope_table_torch(torch.arange(blocks * slots) * 3, head_dim, 10_000.0)
    args = (qkv, q_weight, k_weight, table, EPS, heads)

    flat = qkv.view(blocks * slots, -1, head_dim)
    q = rms_norm_rope_torch(flat[:, :heads], q_weight, table, EPS)
    k = rms_norm_rope_torch(flat[:, heads : heads + kv_heads], k_weight, table, EPS)
    q, k, v = (
        x.double().unflatten(0, (blocks, slots)) for x in (q, k, flat[:, heads + kv_heads :])
    )
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    probs = (torch.einsum("rqhd,rkhd->rhqk", q, k) / head_dim**0.5).softmax(-1)
    exact = torch.einsum("rhqk,rkhd->rqhd", probs, v)

    tolerance = (32 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps
    reference = block_self_attention(*args)
    assert reference.is_contiguous() and reference.dtype == dtype
    torch.testing.assert_close(reference.double(), exact, rtol=tolerance, atol=tolerance)
    kernel = launch("block_attention.block_self_attention", *args)
    torch.testing.assert_close(kernel.double(), exact, rtol=tolerance, atol=tolerance)


def test_width_that_is_no_number_of_heads_is_named() -> None:
    with pytest.raises(AssertionError, match="qkv has 7 channels"):
        block_self_attention(
            torch.zeros(1, 1, 7), torch.ones(2), torch.ones(2), torch.zeros(1, 1, 2), EPS, 1
        )
