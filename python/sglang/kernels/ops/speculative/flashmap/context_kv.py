"""Writes the drafter's context keys and values of all layers into the paged KV pool.

One projection gives every layer's keys and values of the newly committed positions; this op norms
and rotates the keys, leaves the values as they are, casts both to the pool's dtype and scatters
them at the positions' slots, in one launch.

A pool keeps one tensor a layer, so the kernel takes a table of their addresses. The table is cached
by the addresses themselves and so can never be stale; it is never evicted, because a captured graph
keeps reading it. It is copied from the host when a pool is first seen: call the op once before
capturing it, as graph runners' warm-up does.

A verify window is wider than what it commits. With ``commit_lens`` the kernel reads on the device
how many columns of each request to write, so the host need not know.
"""

import functools
from typing import List, Optional, Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.device import require_pool_dtype
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.norm import norm_rotate, rms_norm_rope_torch
from sglang.kernels.ops.speculative.flashmap.rope import load_rope
from sglang.srt.utils.custom_op import register_custom_op

_MAX_BLOCK_HEADS = 16


@functools.cache
def address_table(addresses: Tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``addresses`` as int64 on ``device``, kept for good."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def write_context_kv_torch(
    kv: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    key_buffers: List[torch.Tensor],
    value_buffers: List[torch.Tensor],
    eps: float,
    commit_lens: Optional[torch.Tensor] = None,
) -> None:
    """Reference of :func:`write_context_kv`."""
    if not slots.numel():
        return
    keep = slots >= 0
    if commit_lens is not None:
        columns = torch.arange(slots.numel() // commit_lens.numel(), device=slots.device)
        keep = keep & (columns < commit_lens[:, None]).flatten()
    kv, rope, slots = kv[keep], rope[keep], slots[keep].long()
    for layer, (keys, values) in enumerate(zip(key_buffers, value_buffers, strict=True)):
        k = rms_norm_rope_torch(kv[:, layer, 0], k_weight[layer], rope, eps)
        keys[slots] = k.to(keys.dtype)
        values[slots] = kv[:, layer, 1].to(values.dtype)


@triton.jit
def _context_kv_kernel(
    kv_ptr,
    k_weight_ptr,
    rope_ptr,
    slots_ptr,
    addresses_ptr,
    pool_ptr,
    commit_lens_ptr,
    width,
    key_stride,
    value_stride,
    eps,
    HAS_COMMIT_LENS: tl.constexpr,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    dtype: tl.constexpr = kv_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    if HAS_COMMIT_LENS:
        if token % width >= tl.load(commit_lens_ptr + token // width):
            return
    head = tl.program_id(2) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (d < D)[None, :]
    offset = head[:, None] * D + d[None, :]
    row = kv_ptr + (token * LAYERS + layer) * (2 * HEADS * D)
    k = tl.load(row + offset, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(row + HEADS * D + offset, mask=mask, other=0.0)
    weight = tl.load(k_weight_ptr + layer * D + d, mask=d < D, other=0.0).to(tl.float32)
    rope_row = token + tl.zeros((1,), tl.int64)
    cos, sin = load_rope(rope_ptr, rope_row, rope_row >= 0, D, 1, BLOCK_D)
    even, odd = norm_rotate(k, weight, cos, sin, eps, D, BLOCK_HEADS, BLOCK_D, dtype)
    k = tl.reshape(tl.join(even, odd), (BLOCK_HEADS, BLOCK_D))
    # pool_ptr only lends its pointer type.
    keys = tl.load(addresses_ptr + layer).to(pool_ptr.dtype)
    values = tl.load(addresses_ptr + LAYERS + layer).to(pool_ptr.dtype)
    pool_dtype: tl.constexpr = pool_ptr.dtype.element_ty
    tl.store(keys + slot * key_stride + offset, k.to(pool_dtype), mask=mask)
    tl.store(values + slot * value_stride + offset, v.to(pool_dtype), mask=mask)


def _check_pool(buffers: List[torch.Tensor], heads: int, head_dim: int) -> None:
    first = buffers[0]
    for buffer in buffers:
        assert buffer.shape[1:] == (heads, head_dim), "pool and projection differ in heads"
        assert buffer.stride() == (first.stride(0), head_dim, 1) and buffer.dtype == first.dtype


def write_context_kv_triton(
    kv: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    key_buffers: List[torch.Tensor],
    value_buffers: List[torch.Tensor],
    eps: float,
    commit_lens: Optional[torch.Tensor] = None,
) -> None:
    """Launcher of :func:`write_context_kv`."""
    rows, layers, _, heads, head_dim = kv.shape
    assert len(key_buffers) == len(value_buffers) == layers
    assert kv.is_contiguous() and rope.is_contiguous() and slots.is_contiguous()
    assert rope.shape == (rows, head_dim // 2, 2) and rope.dtype == torch.float32
    assert k_weight.shape == (layers, head_dim) and k_weight.is_contiguous()
    assert slots.shape == (rows,)
    assert key_buffers[0].dtype == value_buffers[0].dtype
    _check_pool(key_buffers, heads, head_dim)
    _check_pool(value_buffers, heads, head_dim)
    require_pool_dtype(key_buffers[0].dtype, kv.device)
    if rows == 0:
        return
    assert commit_lens is None or (commit_lens.is_contiguous() and rows % commit_lens.numel() == 0)
    addresses = tuple(buffer.data_ptr() for buffer in (*key_buffers, *value_buffers))
    block_heads = min(triton.next_power_of_2(heads), _MAX_BLOCK_HEADS)
    _context_kv_kernel[(rows, layers, triton.cdiv(heads, block_heads))](
        kv,
        k_weight,
        rope,
        slots,
        address_table(addresses, kv.device),
        key_buffers[0],
        commit_lens if commit_lens is not None else slots,
        rows // commit_lens.numel() if commit_lens is not None else 1,
        key_buffers[0].stride(0),
        value_buffers[0].stride(0),
        eps,
        HAS_COMMIT_LENS=commit_lens is not None,
        LAYERS=layers,
        HEADS=heads,
        D=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_D=triton.next_power_of_2(head_dim),
        **launch_options(kv.device),
    )


def _fake_write_context_kv(
    kv: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    key_buffers: List[torch.Tensor],
    value_buffers: List[torch.Tensor],
    eps: float,
    commit_lens: Optional[torch.Tensor] = None,
) -> None:
    return None


_write_context_kv_op = register_custom_op(
    write_context_kv_triton,
    op_name="flashmap_write_context_kv",
    mutates_args=["key_buffers", "value_buffers"],
    fake_impl=_fake_write_context_kv,
)


def write_context_kv(
    kv: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    key_buffers: List[torch.Tensor],
    value_buffers: List[torch.Tensor],
    eps: float,
    commit_lens: Optional[torch.Tensor] = None,
) -> None:
    """Write normed, rotated keys and plain values of ``T`` positions into every layer's pool.

    Args:
        kv: ``(T, L, 2, Hkv, D)``, keys at ``[:, :, 0]`` and values at ``[:, :, 1]``, contiguous;
            float32, bfloat16 or float16.
        k_weight: ``(L, D)``, the key norms' weights, any float dtype.
        rope: ``(T, D / 2, 2)`` float32, of :func:`rope_table` at the rows' positions.
        slots: ``(T,)`` int64 or int32; a negative slot is skipped. Slots written in one call
            must differ (pad with negative slots, or with a slot nobody reads).
        key_buffers: ``L`` tensors ``(pool slots, Hkv, D)`` of one dtype (float32, bfloat16, float16
            or float8_e4m3fn, which saturates) and one row stride.
        value_buffers: likewise.
        eps: the norms' epsilon.
        commit_lens: ``(B,)`` integers, or None to write every row. Rows are then ``B`` windows of
            ``T / B`` columns, and column ``j`` of window ``b`` is written only where
            ``j < commit_lens[b]``.
    """
    implementation = _write_context_kv_op if kv.is_cuda else write_context_kv_torch
    implementation(kv, k_weight, rope, slots, key_buffers, value_buffers, eps, commit_lens)
