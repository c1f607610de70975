"""Cross-attention of draft slots to a request's whole context in the paged KV pool.

Every query of request ``b`` sees all ``lens[b]`` context rows, with no causal mask. So all of a
request's draft blocks lie side by side on the query axis, and with grouped heads the queries of a
group join them: the kernel's query tile is made of these rows, and the context is read once for all
of them instead of once a block.

Few requests would leave most of the GPU idle, so the context is split: each split keeps a running
softmax over its chunk and writes a normalised partial output with its log-sum-exp. The program of a
tile that arrives last merges them in their order, so that results are reproducible: ``out = sum_s
2**(lse_s - max) out_s / sum_s 2**(lse_s - max)``; it puts the tile's counter back to 0 for the next
launch. A context of one chunk needs no merge. How many splits there are depends on shapes and on
the device only; how long a chunk is comes from ``lens`` in the kernel, and short contexts leave the
last splits idle. The launch is therefore the same for every step of a captured graph.

Rounding: scores, softmax and outputs accumulate in float32; unnormalised probabilities are rounded
to the queries' dtype before the second product. float32 inputs use IEEE products (no TF32).
"""

import functools
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.device import require_pool_dtype, sm_count
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.norm import norm_rotate, rms_norm_rope_torch
from sglang.kernels.ops.speculative.flashmap.rope import load_rope
from sglang.kernels.ops.speculative.flashmap.widen import widen
from sglang.srt.utils.custom_op import register_custom_op

# A split shorter than this costs more in the merge than it gains.
_MIN_CHUNK = 64
_MAX_SPLITS = 64
# Tiles of queries that a launch with splits may have.
_MAX_TILES = 4096
_LOG2_E = 1.4426950408889634


class _Tiles(NamedTuple):
    """Tile sizes and launch options of the kernel, by query rows and dtype."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def _tiles(rows: int, dtype: torch.dtype) -> _Tiles:
    if dtype == torch.float32:
        return _Tiles(block_m=16, block_n=32, num_warps=4, num_stages=1, programs_per_sm=2)
    if rows <= 16:
        return _Tiles(block_m=16, block_n=64, num_warps=8, num_stages=3, programs_per_sm=2)
    if rows <= 64:
        block_m = 32 if rows <= 32 else 64
        return _Tiles(block_m=block_m, block_n=64, num_warps=4, num_stages=3, programs_per_sm=2)
    return _Tiles(block_m=128, block_n=64, num_warps=8, num_stages=3, programs_per_sm=1)


def paged_cross_attention_torch(
    q: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    max_ctx: Optional[int] = None,
    norm_weight: Optional[torch.Tensor] = None,
    rope: Optional[torch.Tensor] = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Reference of :func:`paged_cross_attention`; reads ``lens`` on the host."""
    if norm_weight is not None:
        q = rms_norm_rope_torch(q.flatten(0, 1), norm_weight, rope, eps).view(q.shape)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grouped = q.shape[2] != key_buffer.shape[1]
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), lens.tolist(), strict=True)):
        if length == 0:
            continue
        slots = req_to_token[row, :length].long()
        # index_select takes half the time of indexing on a CPU.
        k = key_buffer.index_select(0, slots).to(q.dtype).transpose(0, 1)
        v = value_buffer.index_select(0, slots).to(q.dtype).transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            q[b].transpose(0, 1)[None], k[None], v[None], enable_gqa=grouped
        )
        out[b] = attended[0].transpose(0, 1)
    return out


@triton.jit
def _chunk(length, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Context rows a split takes: whole tiles, at least ``MIN_CHUNK`` rows."""
    even_share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    return tl.maximum(even_share, MIN_CHUNK)


@triton.jit
def _attend_tile(q, k, v, in_context, scale_log2, peak, total, acc):
    """The running softmax of queries ``q`` after one more tile, which holds a context row."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(in_context[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    probs = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(probs, 1)
    acc = tl.dot(probs.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _attend_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    req_to_token_ptr,
    req_pool_indices_ptr,
    lens_ptr,
    norm_weight_ptr,
    rope_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    eps,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    key_stride,
    value_stride,
    table_stride,
    scale_log2,
    NORM: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Programs: (query tile, request and key head, split). The query tile varies fastest, so
    # programs that read the same chunk of context run together and find it in the L2 cache.
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    length = tl.load(lens_ptr + b).to(tl.int32)
    pool_row = tl.load(req_pool_indices_ptr + b).to(tl.int64)
    chunk = _chunk(length, SPLITS, MIN_CHUNK, BLOCK_N)
    start = split * chunk
    end = tl.minimum(start + chunk, length)
    used = tl.maximum(tl.cdiv(length, chunk), 1)
    if SPLITS > 1:
        if split >= used:
            return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    slots_ptr = req_to_token_ptr + pool_row * table_stride
    channel = kv_head * D + d
    # The first tile is read before the queries are there.
    n = start + tl.arange(0, BLOCK_N)
    in_context = n < end
    slot = tl.load(slots_ptr + n, mask=in_context, other=0).to(tl.int64)
    in_kv = in_context[:, None] & (d < D)[None, :]
    k = tl.load(key_ptr + slot[:, None] * key_stride + channel[None, :], mask=in_kv, other=0.0)
    v = tl.load(value_ptr + slot[:, None] * value_stride + channel[None, :], mask=in_kv, other=0.0)
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        cos, sin = load_rope(rope_ptr, b * QUERIES + query, query < QUERIES, D, BLOCK_M, BLOCK_D)
    wait_for_inputs(DEPENDENT)
    in_q = (query < QUERIES)[:, None] & (d < D)[None, :]
    q_offset = b * q_batch_stride + query * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=in_q, other=0.0)
    if NORM:
        even, odd = norm_rotate(
            q.to(tl.float32), norm_weight, cos, sin, eps, D, BLOCK_M, BLOCK_D, dtype
        )
        q = tl.reshape(tl.join(even, odd), (BLOCK_M, BLOCK_D))

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if start < end:
        peak, total, acc = _attend_tile(
            q, widen(k, dtype), widen(v, dtype), in_context, scale_log2, peak, total, acc
        )
    for tile in tl.range(start + BLOCK_N, end, BLOCK_N):
        n = tile + tl.arange(0, BLOCK_N)
        in_context = n < end
        slot = tl.load(slots_ptr + n, mask=in_context, other=0).to(tl.int64)
        in_kv = in_context[:, None] & (d < D)[None, :]
        k = tl.load(key_ptr + slot[:, None] * key_stride + channel[None, :], mask=in_kv, other=0.0)
        v = tl.load(
            value_ptr + slot[:, None] * value_stride + channel[None, :], mask=in_kv, other=0.0
        )
        peak, total, acc = _attend_tile(
            q, widen(k, dtype), widen(v, dtype), in_context, scale_log2, peak, total, acc
        )
    # No context at all leaves 0 / 1.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]

    out_row = (b * QUERIES + query) * HEADS + head
    if SPLITS > 1:
        if used > 1:
            entry = out_row * SPLITS
            in_rows = query < QUERIES
            tl.store(lse_ptr + entry + split, peak + tl.log2(total), mask=in_rows)
            partial = partial_ptr + entry[:, None] * D + d[None, :]
            tl.store(partial + split * D, acc, mask=in_q)
            tl.debug_barrier()  # all of the part is stored before it counts as arrived
            tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
            if arrived != used - 1:
                return
            tl.store(arrived_ptr + tile, 0)
            part = tl.arange(0, BLOCK_SPLITS)
            lse = tl.load(
                lse_ptr + entry[:, None] + part[None, :],
                mask=in_rows[:, None] & (part < used)[None, :],
                other=float("-inf"),
                cache_modifier=".cg",
            )
            peak = tl.where(in_rows, tl.max(lse, 1), 0.0)
            total = tl.sum(tl.exp2(lse - peak[:, None]), 1)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for first in range(0, used, TOGETHER):
                for i in tl.static_range(TOGETHER):
                    live = in_rows & (first + i < used)
                    one = tl.load(
                        lse_ptr + entry + first + i,
                        mask=live,
                        other=float("-inf"),
                        cache_modifier=".cg",
                    )
                    out = tl.load(
                        partial + (first + i) * D,
                        mask=in_q & live[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    acc += out * tl.exp2(one - peak)[:, None]
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    merged = out_ptr + out_row[:, None] * D + d[None, :]
    tl.store(merged, acc.to(out_ptr.dtype.element_ty), mask=in_q)


@functools.cache
def _arrival_counters(device: torch.device) -> torch.Tensor:
    """One a tile, 0 between launches; kept for good, because captured graphs use them."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def paged_cross_attention_triton(
    q: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    max_ctx: Optional[int] = None,
    norm_weight: Optional[torch.Tensor] = None,
    rope: Optional[torch.Tensor] = None,
    eps: float = 0.0,
    splits: Optional[int] = None,
) -> torch.Tensor:
    """Launcher of :func:`paged_cross_attention`; ``splits`` overrides the number of splits."""
    batch, queries, heads, head_dim = q.shape
    kv_heads = key_buffer.shape[1]
    assert heads % kv_heads == 0 and q.stride(3) == 1
    for buffer in (key_buffer, value_buffer):
        assert buffer.shape[1:] == (kv_heads, head_dim) and buffer.stride()[1:] == (head_dim, 1)
        require_pool_dtype(buffer.dtype, q.device)
    assert req_to_token.stride(1) == 1
    assert req_pool_indices.shape == lens.shape == (batch,)
    assert req_pool_indices.is_contiguous() and lens.is_contiguous()
    if norm_weight is not None:
        assert norm_weight.shape == (head_dim,) and norm_weight.is_contiguous()
        assert rope.shape == (batch * queries, head_dim // 2, 2) and rope.is_contiguous()
        assert rope.dtype == torch.float32

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    rows = queries * (heads // kv_heads)
    tiles = _tiles(rows, q.dtype)
    programs = triton.cdiv(rows, tiles.block_m) * batch * kv_heads
    if splits is None:
        fill = tiles.programs_per_sm * sm_count(q.device) // programs
        longest = triton.cdiv(max_ctx or req_to_token.shape[1], _MIN_CHUNK)
        splits = max(1, min(fill, longest, _MAX_SPLITS))
    if splits > 1:
        partial_shape = (batch, queries, heads, splits)
        partial = torch.empty((*partial_shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(partial_shape, dtype=torch.float32, device=q.device)
        assert programs <= _MAX_TILES, f"{programs} tiles of queries cannot share their context"
    else:
        partial = lse = out
    block_d = triton.next_power_of_2(head_dim)
    _attend_kernel[(triton.cdiv(rows, tiles.block_m), batch * kv_heads, splits)](
        q,
        key_buffer,
        value_buffer,
        req_to_token,
        req_pool_indices,
        lens,
        norm_weight if norm_weight is not None else q,
        rope if rope is not None else q,
        out,
        partial,
        lse,
        _arrival_counters(q.device),
        eps,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        key_buffer.stride(0),
        value_buffer.stride(0),
        req_to_token.stride(0),
        head_dim**-0.5 * _LOG2_E,
        NORM=norm_weight is not None,
        QUERIES=queries,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        SPLITS=splits,
        MIN_CHUNK=_MIN_CHUNK,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        TOGETHER=4 if tiles.block_m <= 32 else 1,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(q.device),
    )
    return out


def _fake_paged_cross_attention(
    q: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    max_ctx: Optional[int] = None,
    norm_weight: Optional[torch.Tensor] = None,
    rope: Optional[torch.Tensor] = None,
    eps: float = 0.0,
    splits: Optional[int] = None,
) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


_paged_cross_attention_op = register_custom_op(
    paged_cross_attention_triton,
    op_name="flashmap_paged_cross_attention",
    mutates_args=[],
    fake_impl=_fake_paged_cross_attention,
)


def paged_cross_attention(
    q: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    max_ctx: Optional[int] = None,
    norm_weight: Optional[torch.Tensor] = None,
    rope: Optional[torch.Tensor] = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """``softmax(q k^T / sqrt(D)) v`` of every query over its request's whole context.

    Args:
        q: ``(B, Q, H, D)`` queries, float32, bfloat16 or float16; channels are contiguous.
            ``Q`` counts all slots of all of a request's draft blocks.
        key_buffer: ``(pool slots, Hkv, D)`` normed and rotated keys, of ``q``'s dtype or another
            float dtype (float8_e4m3fn with scale 1 included). ``Hkv`` divides ``H``.
        value_buffer: likewise.
        req_to_token: ``(rows, context)`` int32, the slots of each request's positions.
        req_pool_indices: ``(B,)`` integers, each request's row of ``req_to_token``.
        lens: ``(B,)`` integers, context rows of each request; 0 gives zeros.
        max_ctx: a bound on ``lens`` known to the host, by which the context is split; the width of
            ``req_to_token`` when None. Not read by the reference.
        norm_weight: ``(D,)``, any float dtype: queries are normed and rotated first, as by
            :func:`rms_norm_rope`; None: they are already.
        rope: ``(B Q, D / 2, 2)`` float32, of :func:`rope_table`; with ``norm_weight``.
        eps: the norm's epsilon.

    Returns:
        ``(B, Q, H, D)``, contiguous, in ``q``'s dtype.
    """
    implementation = _paged_cross_attention_op if q.is_cuda else paged_cross_attention_torch
    return implementation(
        q,
        key_buffer,
        value_buffer,
        req_to_token,
        req_pool_indices,
        lens,
        max_ctx,
        norm_weight,
        rope,
        eps,
    )
