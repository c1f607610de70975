"""Attention of a verify step: L draft tokens a request over its paged prefix and each other.

Every draft token sees the request's whole prefix, and of the other draft tokens its ancestors (a
tree, given by a mask of L x L bits a request) or those before it (a chain). Decode kernels read
the prefix once per query token and prefill kernels once per query head; here all query heads of a
key head and all draft tokens are the rows of one query tile (``G = H / Hkv`` heads times L tokens),
so the prefix is read once per key head. The prefix needs no mask: only the L x L block has one.

Work is dealt out evenly, whatever the lengths. A unit is a (request, key head); its tiles are its
keys in steps of ``BLOCK_N``, the drafts' behind the prefix's (in tiles of their own where the pool
holds another type or is scaled). The tiles of all units lie on one line, which ``programs``
programs cut into equal runs (stream-K): one huge prefix is read by the whole GPU, many small ones
by a program each, and both at once in one batch. A run that goes over from one unit to the next
pays a second beginning and end, worth a few tiles; so if runs that are longer by less than that are
enough without any that goes over, each unit is padded to a multiple of their length. Where the cuts
fall is computed on the device from ``kv_indptr``; the launch depends on shapes and on the device
only, so it can be captured in a CUDA graph. A program that holds a unit whole writes its output. A
unit that was cut leaves one normalised partial output and log-sum-exp per run, and a second kernel,
one group of programs per cut, merges them:
``out = sum_s 2**(lse_s - max) out_s / sum_s 2**(lse_s - max)``. A program cuts at most two units,
at its two ends, so two slots of scratch a program are enough. On sm_90 and later the merge is
launched with the first kernel (programmatic dependent launch), finds its cut, and waits for that
kernel's end only then.

Row blocks: more rows than one block holds take several programs for the same run, launched side by
side so that all but one find it in the L2 cache. wgmma multiplies tiles of 64 rows, and 17 tokens
of 4 heads are 68: 128 rows or twice 64. A tail beside 64 rows, in the same program, measured slower
on an H200 in every shape: of 16 rows, which are no wgmma's, and of 8 whose products are transposed,
which are, but wait for each other.

Rounding: scores, softmax and outputs accumulate in float32; probabilities are rounded to the
queries' dtype before the second product; float8 keys and values are widened exactly and their
scales applied in float32. float32 inputs use IEEE products (no TF32).

This module needs nothing of sglang but its registration helper, and does without that: the
benchmark tunes a copy of it on machines that have only torch and Triton.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.widen import widen
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

try:
    from sglang.srt.utils.custom_op import register_custom_op
except ImportError:  # a copy of this file, on a machine without sglang
    register_custom_op = None

_LOG2_E = 1.4426950408889634
# Runs may be longer by fewer tiles than this so that none goes over from one unit to the next.
_SLACK = 4
# Programs per cut of the merge kernel.
_MERGERS = 8
# It takes a unit of up to so many runs so many rows at a time, others one row and so many runs.
_FEW_RUNS, _FEW_ROWS, _MANY_RUNS = 8, 8, 32
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Tiles(NamedTuple):
    """Tile sizes and launch options of the split kernel."""

    block_m: int
    """Query rows of a program."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int = 2
    """Shortest run of tiles a program takes."""


@functools.cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take: 227 kB on Hopper, 99 on Ada."""
    if device.type != "cuda":
        return 227 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _extent(buffer: torch.Tensor) -> int:
    """Elements from a pool's first slot to behind its last."""
    return buffer.shape[0] * buffer.stride(0)


@functools.cache
def _dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def choose_tiles(
    rows: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, shared: int = 227 << 10
) -> Tiles:
    """The default ``Tiles`` for ``rows = L * G`` query rows a key head and ``shared`` bytes of
    shared memory a program."""
    wide = max(triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim)) > 128
    small = shared < 160 << 10
    if dtype == torch.float32:
        return Tiles(16, 16 if wide else 32, 4, 1, 2)
    if rows <= 32:
        return Tiles(16 if rows <= 16 else 32, 32 if wide else 64, 4, 2 if small else 3, 2)
    if wide:
        return Tiles(64, 16 if small else 32, 4, 2, 1)
    if small:
        return Tiles(64, 64, 4, 2, 1)
    # Measured on an H200 (``verify_attention.py --tune``): blocks of 64 rows, two programs an SM,
    # also where their loads of keys repeat, but for 65 to 128 rows one block of 128.
    return Tiles(128, 64, 8, 3, 1) if 64 < rows <= 128 else Tiles(64, 64, 4, 3, 2)


def scratch_bytes(
    rows: int, v_head_dim: int, tiles: Tiles, device: torch.device, programs: Optional[int] = None
) -> int:
    """Bytes of scratch a call takes, whatever its batch and lengths."""
    row_blocks = triton.cdiv(rows, tiles.block_m)
    if programs is None:
        programs = _programs(tiles, row_blocks, device)
    return row_blocks * 2 * programs * tiles.block_m * (v_head_dim + 1) * 4


def _programs(tiles: Tiles, row_blocks: int, device: torch.device) -> int:
    return max(1, tiles.programs_per_sm * _sm_count(device) // row_blocks)


def verify_attention_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    mask: Optional[torch.Tensor],
    max_len: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    window: int = -1,
    sinks: Optional[torch.Tensor] = None,
) -> None:
    """Reference of :func:`verify_attention`; reads lengths on the host.

    Computes in float32, or in float64 when ``q`` is.
    """
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, kv_heads = q.shape[1], key_buffer.shape[1]
    rows, keys = qo_indptr.tolist(), kv_indptr.tolist()
    for b in range(len(rows) - 1):
        new = slice(rows[b], rows[b + 1])
        length, prefix = rows[b + 1] - rows[b], keys[b + 1] - keys[b]
        slots = kv_indices[keys[b] : keys[b + 1]].long()
        all_k = torch.cat((key_buffer[slots].to(exact) * k_scale, k[new].to(exact)))
        all_v = torch.cat((value_buffer[slots].to(exact) * v_scale, v[new].to(exact)))
        all_k, all_v = (x.repeat_interleave(heads // kv_heads, 1) for x in (all_k, all_v))
        scores = torch.einsum("qhd,nhd->hqn", q[new].to(exact), all_k) * sm_scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        if mask is None:
            sees = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        else:
            bits = mask[b, :length, :, None] >> torch.arange(64, device=q.device)
            sees = (bits & 1).flatten(1)[:, :length] != 0
        visible = torch.cat((sees.new_ones(length, prefix), sees), dim=1)
        if window > 0:
            # Siblings share a position: it is the number of ancestors that counts.
            depth = sees.sum(1) - 1
            before = torch.arange(prefix, device=q.device) - prefix
            visible &= depth[:, None] - torch.cat((before, depth))[None, :] <= window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.to(exact).view(heads, 1, 1).expand(heads, length, 1)
            scores = torch.cat((scores, sink), dim=2)
        probs = scores.softmax(2)[:, :, : prefix + length]
        out[new] = torch.einsum("hqn,nhd->qhd", probs, all_v).to(out.dtype)


@triton.jit
def _unit_tiles(prefix, pad, L: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """A unit's tiles on the line: its own, then gaps up to a multiple of ``pad``."""
    if PARTS == 1:
        tiles = tl.cdiv(prefix + L, BLOCK_N)
    else:
        tiles = tl.cdiv(prefix, BLOCK_N) + tl.cdiv(L, BLOCK_N)
    return tl.cdiv(tiles, pad) * pad


@triton.jit
def _tile_line(
    kv_indptr,
    batch,
    programs,
    min_tiles,
    L: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SLACK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """How the tiles are dealt out: each request's on the line and where it ends there, the line's
    length, the tiles of a run, and what units are padded to."""
    r = tl.arange(0, BLOCK_B)
    first = tl.load(kv_indptr + r, mask=r < batch, other=0).to(tl.int32)
    last = tl.load(kv_indptr + r + 1, mask=r < batch, other=0).to(tl.int32)
    prefix = last - first
    tiles = tl.where(r < batch, _unit_tiles(prefix, 1, L, BLOCK_N, PARTS) * KV_HEADS, 0)
    quota = tl.maximum(tl.cdiv(tl.sum(tiles, 0), programs), min_tiles)
    # How long runs would have to be if none went over to another unit.
    longer = quota + tl.arange(0, SLACK)
    runs = tl.cdiv((tiles // KV_HEADS)[:, None], longer[None, :]) * KV_HEADS
    enough = tl.min(tl.where(tl.sum(runs, 0) <= programs, longer, quota + SLACK), 0)
    pad = tl.where(enough < quota + SLACK, enough, 1)
    quota = tl.maximum(quota, pad)
    tiles = tl.where(r < batch, _unit_tiles(prefix, pad, L, BLOCK_N, PARTS) * KV_HEADS, 0)
    return tiles, tl.cumsum(tiles, 0), tl.sum(tiles, 0), quota, pad


@triton.jit
def _load_q(q_ptr, row, length, row0, head0, token_stride, head_stride, d, GROUP, D):
    """Row ``r`` of a unit is query head ``head0 + r % GROUP`` of draft token ``r // GROUP``."""
    token = row // GROUP
    offset = (row0 + token) * token_stride + (head0 + row % GROUP) * head_stride
    in_q = (token < length)[:, None] & (d < D)[None, :]
    return tl.load(q_ptr + offset[:, None] + d[None, :], mask=in_q, other=0.0)


@triton.jit
def _load_rows(ptr, offset, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pool rows that begin at ``offset``."""
    where = ptr + (offset[:, None] + d[None, :])
    if D == BLOCK_D:
        return tl.load(where)
    return tl.load(where, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _mask_word(mask_ptr, token, b, length, word, L: tl.constexpr):
    """Bits of which drafts ``64 * word`` and up draft ``token`` sees."""
    WORDS: tl.constexpr = (L + 63) // 64
    inside = (token < length) & (word >= 0) & (word < WORDS)
    return tl.load(mask_ptr + (b * L + token) * WORDS + word, mask=inside, other=0)


@triton.jit
def _depth(mask_ptr, token, b, length, L: tl.constexpr, HAS_MASK: tl.constexpr):
    """Position of draft ``token`` after the prefix: its ancestors."""
    if HAS_MASK:
        depth = tl.zeros_like(token) - 1
        bit = tl.arange(0, 64)
        for word in tl.static_range((L + 63) // 64):
            bits = _mask_word(mask_ptr, token, b, length, word, L)
            seen = (bits[:, None] >> bit[None, :].to(tl.int64)) & 1
            depth += tl.sum(tl.where((word * 64 + bit < length)[None, :], seen, 0), 1).to(tl.int32)
    else:
        depth = token
    return depth


@triton.jit
def _two_words(mask_ptr, token, b, length, j0, L: tl.constexpr):
    """The words of each row's mask that hold its bits of drafts ``j0`` to ``j0 + 63``."""
    word = (j0 + 64) // 64
    low = _mask_word(mask_ptr, token, b, length, word - 1, L)
    high = _mask_word(mask_ptr, token, b, length, word, L)
    return low, high


@triton.jit
def _tile_bits(low, high, j0, length):
    """Bit ``n``: whether a row sees key ``n`` of the tile whose first key is draft ``j0``; if that
    is negative, keys of the prefix come first, which every row sees."""
    shift = ((j0 + 64) % 64).to(tl.uint64)
    # In two steps, as there is no shift by 64.
    bits = (low.to(tl.uint64) >> shift) | ((high.to(tl.uint64) << (63 - shift)) << 1)
    one = tl.full((), 1, tl.uint64)
    bits = bits | ((one << tl.maximum(-j0, 0).to(tl.uint64)) - 1)
    keys = tl.maximum(length - j0, 0)
    inside = (one << tl.minimum(keys, 63).to(tl.uint64)) - 1
    return tl.where(keys < 64, bits & inside, bits)


@triton.jit
def _attend(
    q, k, v, visible, peak, total, acc, scale_log2, LOGIT_CAP: tl.constexpr, MASKED: tl.constexpr
):
    """One tile of keys: the running softmax of ``q`` over ``k`` and ``v``."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if LOGIT_CAP > 0:
        # cap * tanh(s / cap), in units of log2.
        scores = 2 * tl.sigmoid(scores * (2.0 / 1.4426950408889634 / LOGIT_CAP) * scale_log2) - 1
        scores = scores * (LOGIT_CAP * 1.4426950408889634)
        scale_log2 = 1.0
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    base = new_peak
    if MASKED:
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    probs = tl.exp2(scores * scale_log2 - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(probs, 1)
    acc = tl.dot(probs.to(q.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _start(sinks_ptr, row, head0, has_sink, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr):
    """Running softmax before the first key: nothing, or the head's sink."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head0 + row % GROUP).to(tl.float32) * 1.4426950408889634
        peak = tl.where(has_sink, sink, float("-inf"))
        return peak, tl.where(has_sink & (sink > float("-inf")), 1.0, 0.0)
    total = tl.zeros_like(row).to(tl.float32)
    return total + float("-inf"), total


@triton.jit
def _finish(
    acc,
    total,
    peak,
    row,
    local,
    whole,
    slot,
    length,
    row0,
    head0,
    dv,
    out_ptr,
    partial_ptr,
    lse_ptr,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes a run's rows: to the output if the run is a whole unit, else to scratch ``slot``."""
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    token = row // GROUP
    stored = (token < length)[:, None] & (dv < DV)[None, :]
    offset = (row0 + token) * out_token_stride + (head0 + row % GROUP) * out_head_stride
    tl.store(
        out_ptr + offset[:, None] + dv[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=stored & whole,
    )
    scratch = slot * BLOCK_M + local
    tl.store(partial_ptr + scratch[:, None] * DV + dv[None, :], acc, mask=stored & (whole == 0))
    lse = tl.where(total > 0, peak + tl.log2(total), float("-inf"))
    tl.store(lse_ptr + scratch, lse, mask=(token < length) & (whole == 0))


@triton.jit(do_not_specialize=("batch", "programs", "min_tiles"))
def _verify_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    key_ptr,
    value_ptr,
    qo_indptr,
    kv_indptr,
    kv_indices_ptr,
    mask_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    out_token_stride,
    out_head_stride,
    scale_log2,
    k_scale,
    v_scale,
    batch,
    programs,
    min_tiles,
    L: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SLACK: tl.constexpr,
    SAME_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SMALL_POOL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Programs: (row block, run of tiles).
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    block = tl.program_id(0)
    program = tl.program_id(1)
    tiles, ends, line, quota, pad = _tile_line(
        kv_indptr, batch, programs, min_tiles, L, KV_HEADS, BLOCK_N, BLOCK_B, SLACK, PARTS
    )
    begin = program * quota
    end = tl.minimum(begin + quota, line)
    if begin >= line:
        return
    # The request of the run's first tile, and where that request begins on the line.
    b = tl.sum((ends <= begin).to(tl.int32), 0).to(tl.int64)
    base = tl.sum(tl.where(ends <= begin, tiles, 0), 0)

    local = tl.arange(0, BLOCK_M)
    row = block * BLOCK_M + local
    token = row // GROUP
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)

    at = begin
    while at < end:
        row0 = tl.load(qo_indptr + b).to(tl.int64)
        length = tl.load(qo_indptr + b + 1).to(tl.int32) - row0.to(tl.int32)
        key0 = tl.load(kv_indptr + b).to(tl.int64)
        prefix = tl.load(kv_indptr + b + 1).to(tl.int32) - key0.to(tl.int32)
        slots_ptr = kv_indices_ptr + key0
        own_tiles = _unit_tiles(prefix, 1, L, BLOCK_N, PARTS)
        unit_tiles = _unit_tiles(prefix, pad, L, BLOCK_N, PARTS)
        kv_head = (at - base) // unit_tiles
        first = at - base - kv_head * unit_tiles
        last = tl.minimum(first + (end - at), unit_tiles)
        head0 = kv_head * GROUP
        ends_unit = last == unit_tiles

        q = _load_q(q_ptr, row, length, row0, head0, q_token_stride, q_head_stride, d, GROUP, D)
        peak, total = _start(sinks_ptr, row, head0, ends_unit, HAS_SINKS, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        # A key at n is near a draft if depth + prefix - n <= WINDOW.
        reach = token
        if WINDOW > 0:
            reach = _depth(mask_ptr, token, b, length, L, HAS_MASK) + prefix - WINDOW

        keys_ptr = key_ptr + kv_head * key_head_stride
        values_ptr = value_ptr + kv_head * value_head_stride
        new_keys_ptr = k_ptr + row0 * k_token_stride + kv_head * k_head_stride
        new_values_ptr = v_ptr + row0 * v_token_stride + kv_head * v_head_stride
        prefix_scale = scale_log2 * k_scale
        # Whole tiles of the prefix, which need no mask unless there is a window.
        whole_tiles = prefix // BLOCK_N
        last_whole = tl.minimum(last, whole_tiles)
        next_slot = tl.load(slots_ptr + first * BLOCK_N + n, mask=first < last_whole, other=0)
        for tile in tl.range(first, last_whole):
            position = tile * BLOCK_N + n
            # Read one tile ahead: an address that waits for its slot would stall every tile.
            slot = next_slot.to(tl.int32)
            if not SMALL_POOL:
                slot = slot.to(tl.int64)
            next_slot = tl.load(slots_ptr + position + BLOCK_N, mask=tile + 1 < last_whole, other=0)
            offset = slot * key_stride
            k = widen(_load_rows(keys_ptr, offset, d, D, BLOCK_D), dtype)
            if not SAME_STRIDE:
                offset = slot * value_stride
            v = widen(_load_rows(values_ptr, offset, dv, DV, BLOCK_DV), dtype)
            # Set here: what a loop finds set and sets anew must keep its type.
            near = None
            if WINDOW > 0:
                near = position[None, :] >= reach[:, None]
            peak, total, acc = _attend(
                q, k, v, near, peak, total, acc, prefix_scale, LOGIT_CAP, WINDOW > 0
            )
        # The rest of the prefix and, behind it in the same tiles, the drafts. Those have tiles of
        # their own (PARTS 2) where the pool's keys are of another type or scaled.
        rest = prefix - whole_tiles * BLOCK_N
        rest_ptr = slots_ptr + whole_tiles * BLOCK_N
        for part in tl.static_range(PARTS):
            # Keys of this part: ``old`` of the prefix, then ``new`` drafts.
            old, new, scale = rest, length, prefix_scale
            start = tl.maximum(first - whole_tiles, 0)
            stop = tl.minimum(last, own_tiles) - whole_tiles
            if PARTS == 2:
                if part == 0:
                    new = 0
                    stop = tl.minimum(stop, tl.cdiv(rest, BLOCK_N))
                else:
                    acc = acc * v_scale
                    scale = scale_log2
                    old = 0
                    start = tl.maximum(start - tl.cdiv(rest, BLOCK_N), 0)
                    stop = stop - tl.cdiv(rest, BLOCK_N)
            for tile in tl.range(start, stop, num_stages=1):
                j0 = tile * BLOCK_N - old
                j = j0 + n
                inside = j < new
                slot = tl.load(rest_ptr + tile * BLOCK_N + n, mask=j < 0, other=0)
                slot = slot.to(tl.int32).to(tl.int64)
                if PARTS == 1:
                    key_row = tl.where(
                        j < 0, keys_ptr + slot * key_stride, new_keys_ptr + j * k_token_stride
                    )
                    value_row = tl.where(
                        j < 0, values_ptr + slot * value_stride, new_values_ptr + j * v_token_stride
                    )
                    if ALIGNED:
                        # Not known of a row that is one of two buffers', and loads of 16 bytes
                        # need it.
                        key_row = tl.multiple_of(key_row, 16)
                        value_row = tl.multiple_of(value_row, 16)
                elif part == 0:
                    key_row = keys_ptr + slot * key_stride
                    value_row = values_ptr + slot * value_stride
                else:
                    key_row = new_keys_ptr + j * k_token_stride
                    value_row = new_values_ptr + j * v_token_stride
                k = tl.load(
                    key_row[:, None] + d[None, :],
                    mask=inside[:, None] & (d < D)[None, :],
                    other=0.0,
                )
                v = tl.load(
                    value_row[:, None] + dv[None, :],
                    mask=inside[:, None] & (dv < DV)[None, :],
                    other=0.0,
                )
                k, v = widen(k, dtype), widen(v, dtype)
                if HAS_MASK:
                    # Not before the prefix, through whose loop they would take registers.
                    low, high = _two_words(mask_ptr, token, b, length, j0, L)
                    bits = _tile_bits(low, high, j0, new)
                    sees = ((bits[:, None] >> n.to(tl.uint64)[None, :]) & 1) != 0
                else:
                    sees = j[None, :] <= tl.minimum(token, new - 1)[:, None]
                if WINDOW > 0:
                    depth = _depth(mask_ptr, tl.maximum(j, 0), b, length, L, HAS_MASK)
                    key_position = prefix + tl.where(j < 0, j, depth)
                    sees = sees & (key_position[None, :] >= reach[:, None])
                peak, total, acc = _attend(q, k, v, sees, peak, total, acc, scale, LOGIT_CAP, True)

        whole = (first == 0) & ends_unit
        scratch = (block * programs + program).to(tl.int64) * 2 + (at > begin).to(tl.int32)
        _finish(
            acc,
            total,
            peak,
            row,
            local,
            whole,
            scratch,
            length,
            row0,
            head0,
            dv,
            out_ptr,
            partial_ptr,
            lse_ptr,
            out_token_stride,
            out_head_stride,
            GROUP,
            DV,
            BLOCK_M,
        )
        at += last - first
        request_ends = at >= base + unit_tiles * KV_HEADS
        base = tl.where(request_ends, base + unit_tiles * KV_HEADS, base)
        b = tl.where(request_ends, b + 1, b)


@triton.jit
def _add_run(parts, lse, peak, total, acc):
    """Adds one run's normalised rows ``(R, DV)`` to the running softmax of ``R`` rows."""
    new_peak = tl.maximum(peak, lse)
    top = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(lse - top)
    decay = tl.exp2(peak - top)
    return new_peak, total * decay + weight, acc * decay[:, None] + parts * weight[:, None]


@triton.jit
def _merge_few(
    local,
    rows,
    runs,
    first_slot,
    next_slot,
    dv,
    partial_ptr,
    lse_ptr,
    BLOCK_M,
    DV,
    RUNS: tl.constexpr,
):
    """Rows ``local`` of a unit cut into at most ``RUNS`` runs, each loaded whole."""
    peak = tl.zeros_like(local).to(tl.float32) + float("-inf")
    total = tl.zeros_like(peak)
    acc = tl.zeros_like(peak)[:, None] + tl.zeros_like(dv).to(tl.float32)[None, :]
    for run in tl.static_range(RUNS):
        slot = first_slot
        if run > 0:
            slot = next_slot + 2 * run
        valid = (local < rows) & (run < runs)
        scratch = slot * BLOCK_M + local
        lse = tl.load(lse_ptr + scratch, mask=valid, other=float("-inf"))
        parts = tl.load(
            partial_ptr + scratch[:, None] * DV + dv[None, :],
            mask=valid[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        peak, total, acc = _add_run(parts, lse, peak, total, acc)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _merge_many(
    local, runs, first_slot, next_slot, dv, partial_ptr, lse_ptr, BLOCK_M, DV, RUNS: tl.constexpr
):
    """Row ``local`` of a unit, ``RUNS`` runs at a time."""
    lane = tl.arange(0, RUNS)
    peak = tl.full((RUNS,), float("-inf"), tl.float32)
    total = tl.zeros((RUNS,), tl.float32)
    acc = tl.zeros_like(total)[:, None] + tl.zeros_like(dv).to(tl.float32)[None, :]
    for start in tl.range(0, runs, RUNS):
        run = start + lane
        slot = tl.where(run == 0, first_slot, next_slot + 2 * run)
        scratch = slot * BLOCK_M + local
        lse = tl.load(lse_ptr + scratch, mask=run < runs, other=float("-inf"))
        parts = tl.load(
            partial_ptr + scratch[:, None] * DV + dv[None, :],
            mask=(run < runs)[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        peak, total, acc = _add_run(parts, lse, peak, total, acc)
    # Each lane holds every RUNS-th run.
    top = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(total * weight, 0)
    return tl.sum(acc * weight[:, None], 0) / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=("batch", "programs", "min_tiles"))
def _verify_merge_kernel(
    qo_indptr,
    kv_indptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    out_token_stride,
    out_head_stride,
    batch,
    programs,
    min_tiles,
    L: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PARTS: tl.constexpr,
    SLACK: tl.constexpr,
    MERGERS: tl.constexpr,
    FEW_RUNS: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    MANY_RUNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Programs: (row block, cut, merger). The cuts inside a unit share its rows.
    block = tl.program_id(0)
    cut = tl.program_id(1) + 1
    tiles, ends, line, quota, pad = _tile_line(
        kv_indptr, batch, programs, min_tiles, L, KV_HEADS, BLOCK_N, BLOCK_B, SLACK, PARTS
    )
    at = cut * quota
    if DEPENDENT:
        # Every program, also those without a cut: when this kernel has ended, so has the first.
        gdc_wait()
    if at >= line:
        return
    b = tl.sum((ends <= at).to(tl.int32), 0).to(tl.int64)
    base = tl.sum(tl.where(ends <= at, tiles, 0), 0)
    key0 = tl.load(kv_indptr + b).to(tl.int32)
    prefix = tl.load(kv_indptr + b + 1).to(tl.int32) - key0
    row0 = tl.load(qo_indptr + b).to(tl.int64)
    length = tl.load(qo_indptr + b + 1).to(tl.int32) - row0.to(tl.int32)
    unit_tiles = _unit_tiles(prefix, pad, L, BLOCK_N, PARTS)
    kv_head = (at - base) // unit_tiles
    unit = base + kv_head * unit_tiles
    if at == unit:
        return
    first_program = unit // quota
    runs = (unit + unit_tiles - 1) // quota - first_program + 1
    slots = (block * programs + first_program).to(tl.int64) * 2
    first_slot = slots + (unit > first_program * quota).to(tl.int32)
    worker = (cut - first_program - 1) * MERGERS + tl.program_id(2)
    workers = (runs - 1) * MERGERS
    rows = tl.minimum(length * GROUP - block * BLOCK_M, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)
    row_block = block * BLOCK_M
    out = out_ptr + row0 * out_token_stride + kv_head * GROUP * out_head_stride
    if runs <= FEW_RUNS:
        for start in tl.range(worker * FEW_ROWS, rows, workers * FEW_ROWS):
            local = start + tl.arange(0, FEW_ROWS)
            few = _merge_few(
                local,
                rows,
                runs,
                first_slot,
                slots,
                dv,
                partial_ptr,
                lse_ptr,
                BLOCK_M,
                DV,
                FEW_RUNS,
            )
            row = row_block + local
            offset = row // GROUP * out_token_stride + row % GROUP * out_head_stride
            tl.store(
                out + offset[:, None] + dv[None, :],
                few.to(out_ptr.dtype.element_ty),
                mask=(local < rows)[:, None] & (dv < DV)[None, :],
            )
    else:
        for one in tl.range(worker, rows, workers):
            many = _merge_many(
                one, runs, first_slot, slots, dv, partial_ptr, lse_ptr, BLOCK_M, DV, MANY_RUNS
            )
            one_row = row_block + one
            one_offset = one_row // GROUP * out_token_stride + one_row % GROUP * out_head_stride
            tl.store(out + one_offset + dv, many.to(out_ptr.dtype.element_ty), mask=dv < DV)


def verify_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    mask: Optional[torch.Tensor],
    max_len: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    window: int = -1,
    sinks: Optional[torch.Tensor] = None,
    tiles: Optional[Tiles] = None,
    programs: Optional[int] = None,
) -> None:
    """Launcher of :func:`verify_attention`; ``tiles`` and ``programs`` override what it chooses."""
    _, heads, head_dim = q.shape
    kv_heads, v_head_dim = value_buffer.shape[1:]
    batch = qo_indptr.shape[0] - 1
    assert heads % kv_heads == 0 and kv_indptr.shape == qo_indptr.shape
    assert k.shape[1:] == key_buffer.shape[1:] == (kv_heads, head_dim)
    assert v.shape[1:] == (kv_heads, v_head_dim) and out.shape == (*q.shape[:2], v_head_dim)
    for x in (q, k, v, out, key_buffer, value_buffer):
        assert x.stride(2) == 1
    for x in (qo_indptr, kv_indptr, kv_indices):
        assert x.is_contiguous()
    assert key_buffer.dtype == value_buffer.dtype and key_buffer.dtype in POOL_DTYPES
    assert sm_scale > 0 and k_scale > 0
    # A row's mask of a tile is one word.
    assert tiles is None or tiles.block_n <= 64
    if mask is not None:
        assert mask.is_contiguous() and mask.dtype == torch.int64
        assert mask.shape == (batch, max_len, triton.cdiv(max_len, 64))
    if q.numel() == 0 or batch == 0:
        return

    group = heads // kv_heads
    rows = max_len * group
    tiles = tiles or choose_tiles(rows, head_dim, v_head_dim, q.dtype, shared_bytes(q.device))
    row_blocks = triton.cdiv(rows, tiles.block_m)
    programs = programs or _programs(tiles, row_blocks, q.device)
    scratch = torch.empty(
        row_blocks * 2 * programs * tiles.block_m * (v_head_dim + 1),
        dtype=torch.float32,
        device=q.device,
    )
    lse = scratch[: row_blocks * 2 * programs * tiles.block_m]
    # Drafts whose keys are like the pool's continue the prefix; others have tiles of their own.
    parts = 1 if k.dtype == key_buffer.dtype and k_scale == v_scale == 1 else 2
    aligned = all(
        x.data_ptr() % 16 == x.stride(0) * x.element_size() % 16 == 0
        and x.stride(1) * x.element_size() % 16 == 0
        for x in (k, v, key_buffer, value_buffer)
    )
    partial = scratch[lse.numel() :]
    block_dv = triton.next_power_of_2(v_head_dim)
    dependent = _dependent_launch(q.device)
    # One compiled kernel for most batch sizes.
    block_b = max(64, triton.next_power_of_2(batch))
    _verify_kernel[(row_blocks, programs)](
        q,
        k,
        v,
        key_buffer,
        value_buffer,
        qo_indptr,
        kv_indptr,
        kv_indices,
        mask,
        sinks,
        out,
        partial,
        lse,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        key_buffer.stride(0),
        key_buffer.stride(1),
        value_buffer.stride(0),
        value_buffer.stride(1),
        out.stride(0),
        out.stride(1),
        sm_scale * _LOG2_E,
        float(k_scale),
        float(v_scale),
        batch,
        programs,
        tiles.min_tiles,
        L=max_len,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        DV=v_head_dim,
        LOGIT_CAP=float(logit_cap or 0.0),
        WINDOW=max(0, window or 0),
        HAS_MASK=mask is not None,
        HAS_SINKS=sinks is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_DV=block_dv,
        BLOCK_B=block_b,
        PARTS=parts,
        SLACK=_SLACK,
        ALIGNED=aligned,
        SAME_STRIDE=key_buffer.stride(0) == value_buffer.stride(0),
        SMALL_POOL=max(_extent(key_buffer), _extent(value_buffer)) < 2**31,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if programs > 1:
        _verify_merge_kernel[(row_blocks, programs - 1, _MERGERS)](
            qo_indptr,
            kv_indptr,
            out,
            partial,
            lse,
            out.stride(0),
            out.stride(1),
            batch,
            programs,
            tiles.min_tiles,
            L=max_len,
            KV_HEADS=kv_heads,
            GROUP=group,
            DV=v_head_dim,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_DV=block_dv,
            BLOCK_B=block_b,
            PARTS=parts,
            SLACK=_SLACK,
            MERGERS=_MERGERS,
            FEW_RUNS=_FEW_RUNS,
            FEW_ROWS=_FEW_ROWS,
            MANY_RUNS=_MANY_RUNS,
            DEPENDENT=dependent,
            launch_pdl=dependent,
            num_warps=4,
        )


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    mask: Optional[torch.Tensor],
    max_len: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    window: int = -1,
    sinks: Optional[torch.Tensor] = None,
) -> None:
    verify_attention_triton(
        q,
        k,
        v,
        out,
        key_buffer,
        value_buffer,
        qo_indptr,
        kv_indptr,
        kv_indices,
        mask,
        max_len,
        sm_scale,
        k_scale,
        v_scale,
        logit_cap,
        window,
        sinks,
    )


_verify_attention_op = _launch
if register_custom_op is not None:
    _verify_attention_op = register_custom_op(
        _launch, op_name="verify_attention_gqa", mutates_args=["out"]
    )


def verify_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    mask: Optional[torch.Tensor],
    max_len: int,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    window: int = -1,
    sinks: Optional[torch.Tensor] = None,
) -> None:
    """Attention of each request's draft tokens over its prefix and each other, into ``out``.

    Args:
        q: ``(T, H, D)`` rotated queries of all draft tokens, request after request; float32,
            bfloat16 or float16, channels contiguous.
        k: ``(T, Hkv, D)`` their rotated keys; ``Hkv`` divides ``H``.
        v: ``(T, Hkv, Dv)`` their values.
        out: ``(T, H, Dv)``, written.
        key_buffer: ``(slots, Hkv, D)`` the pool the prefix lies in, of any of ``POOL_DTYPES``.
        value_buffer: ``(slots, Hkv, Dv)`` likewise.
        qo_indptr: ``(B + 1,)`` integers, each request's first draft token.
        kv_indptr: ``(B + 1,)`` integers, where its prefix begins in ``kv_indices``.
        kv_indices: integers, pool slots of the prefixes in order; slots, so any page size.
        mask: ``(B, L, ceil(L / 64))`` int64, contiguous: bit ``j % 64`` of ``[b, i, j // 64]`` is
            whether draft ``i`` sees draft ``j``, itself included (``verify_mask_bits`` packs
            them). None: drafts up to itself.
        max_len: ``L``, most draft tokens of a request; ``mask`` and the launch are sized by it.
        sm_scale: positive factor of the scores.
        k_scale: factor of the pool's keys; ``v_scale``: of its values. ``k`` and ``v`` have none.
        logit_cap: scores become ``cap * tanh(score / cap)``; 0: they do not.
        window: draft at position ``p`` sees keys at ``p - window`` and later, positions counted
            along the draft's path; not positive: all. ``kv_indices`` may leave out what none sees.
        sinks: ``(H,)``, logits of a key without a value that every query of the head sees.
    """
    implementation = _verify_attention_op if q.is_cuda else verify_attention_torch
    implementation(
        q,
        k,
        v,
        out,
        key_buffer,
        value_buffer,
        qo_indptr,
        kv_indptr,
        kv_indices,
        mask,
        max_len,
        sm_scale,
        k_scale,
        v_scale,
        logit_cap,
        window,
        sinks,
    )
