"""Self-attention among the K slots of each draft block.

A block is a few dozen slots at most, so its whole attention fits in one program: it norms and
rotates the queries and keys as they arrive from the fused projection, takes the softmax over the
block and multiplies the values, and nothing but the output goes back to memory. Slots see each
other in both directions; there is no mask.

Rounding: queries and keys are rounded as in :mod:`.norm`; scores and softmax are float32; the
unnormalised probabilities are rounded to the values' dtype before the second product, as flash
attention does.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.norm import norm_rotate, rms_norm_rope_torch
from sglang.kernels.ops.speculative.flashmap.rope import load_rope
from sglang.srt.utils.custom_op import register_custom_op

_MAX_SLOTS = 64
# tl.dot's smallest tile side.
_MIN_TILE = 16


def _kv_heads(width: int, head_dim: int, num_heads: int) -> int:
    """Key/value heads of a projection ``width`` channels wide, or an AssertionError."""
    kv_heads, odd = divmod(width // head_dim - num_heads, 2)
    assert width % head_dim == 0 and not odd and kv_heads > 0, (
        f"qkv has {width} channels, which are not {num_heads} query heads and equal numbers of "
        f"key and value heads of {head_dim} channels"
    )
    assert num_heads % kv_heads == 0
    return kv_heads


def block_self_attention_torch(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float,
    num_heads: int,
) -> torch.Tensor:
    """Reference of :func:`block_self_attention`."""
    blocks, slots, width = qkv.shape
    head_dim = q_weight.shape[0]
    kv_heads = _kv_heads(width, head_dim, num_heads)
    q, k, v = qkv.view(blocks * slots, -1, head_dim).split((num_heads, kv_heads, kv_heads), dim=1)
    q = rms_norm_rope_torch(q, q_weight, rope, eps)
    k = rms_norm_rope_torch(k, k_weight, rope, eps)
    q, k, v = (x.reshape(blocks, slots, -1, head_dim).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads != num_heads)
    return out.transpose(1, 2).contiguous()


@triton.jit
def _block_attention_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rope_ptr,
    out_ptr,
    eps,
    sm_scale,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    block = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    kv_head = head // (HEADS // KV_HEADS)
    slot = tl.arange(0, BLOCK_SLOTS)
    d = tl.arange(0, BLOCK_D)
    q_weight = tl.load(q_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    in_block = slot < SLOTS
    mask = in_block[:, None] & (d < D)[None, :]
    row = block * SLOTS + slot
    cos, sin = load_rope(rope_ptr, row, in_block, D, BLOCK_SLOTS, BLOCK_D)
    wait_for_inputs(DEPENDENT)
    token = qkv_ptr + row[:, None] * ((HEADS + 2 * KV_HEADS) * D) + d[None, :]
    q = tl.load(token + head * D, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(token + (HEADS + kv_head) * D, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(token + (HEADS + KV_HEADS + kv_head) * D, mask=mask, other=0.0)
    q_even, q_odd = norm_rotate(q, q_weight, cos, sin, eps, D, BLOCK_SLOTS, BLOCK_D, dtype)
    k_even, k_odd = norm_rotate(k, k_weight, cos, sin, eps, D, BLOCK_SLOTS, BLOCK_D, dtype)
    # A dot product does not care in which order the channels come: the halves stay split.
    scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
    scores = tl.dot(q_odd, tl.trans(k_odd), acc=scores, input_precision="ieee") * sm_scale
    scores = tl.where(in_block[None, :], scores, float("-inf"))
    probs = tl.exp(scores - tl.max(scores, 1)[:, None])
    out = tl.dot(probs.to(dtype), v, input_precision="ieee") / tl.sum(probs, 1)[:, None]
    tl.store(out_ptr + row[:, None] * (HEADS * D) + head * D + d[None, :], out.to(dtype), mask=mask)


def block_self_attention_triton(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float,
    num_heads: int,
) -> torch.Tensor:
    """Launcher of :func:`block_self_attention`."""
    blocks, slots, width = qkv.shape
    head_dim = q_weight.shape[0]
    assert qkv.is_contiguous() and rope.is_contiguous() and rope.dtype == torch.float32
    assert rope.shape == (blocks * slots, head_dim // 2, 2)
    assert k_weight.shape == (head_dim,)
    assert q_weight.is_contiguous() and k_weight.is_contiguous()
    assert 1 <= slots <= _MAX_SLOTS, f"a draft block has 1 to {_MAX_SLOTS} slots, got {slots}"
    out = _fake_block_self_attention(qkv, q_weight, k_weight, rope, eps, num_heads)
    if blocks:
        block_slots = max(triton.next_power_of_2(slots), _MIN_TILE)
        _block_attention_kernel[(blocks * num_heads,)](
            qkv,
            q_weight,
            k_weight,
            rope,
            out,
            eps,
            head_dim**-0.5,
            SLOTS=slots,
            HEADS=num_heads,
            KV_HEADS=_kv_heads(width, head_dim, num_heads),
            D=head_dim,
            BLOCK_SLOTS=block_slots,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=2 if block_slots == _MIN_TILE else 4,
            **launch_options(qkv.device),
        )
    return out


def _fake_block_self_attention(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float,
    num_heads: int,
) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1], num_heads, q_weight.shape[0]))


_block_self_attention_op = register_custom_op(
    block_self_attention_triton,
    op_name="flashmap_block_self_attention",
    mutates_args=[],
    fake_impl=_fake_block_self_attention,
)


def block_self_attention(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    eps: float,
    num_heads: int,
) -> torch.Tensor:
    """Norm and rotate queries and keys, then attend within each block, without a mask.

    Args:
        qkv: ``(R, K, (H + 2 Hkv) D)``, the fused projection of ``R`` blocks of ``K`` slots
            (1 to 64): the query heads, then the key heads, then the value heads. Contiguous;
            float32, bfloat16 or float16. ``Hkv`` follows from the width and divides ``H``.
        q_weight: ``(D,)``, the query norm's weight, any float dtype.
        k_weight: ``(D,)``, the key norm's weight, any float dtype.
        rope: ``(R K, D / 2, 2)`` float32, of :func:`rope_table`.
        eps: the norms' epsilon.
        num_heads: ``H``, the query heads.

    Returns:
        ``(R, K, H, D)``, contiguous, in ``qkv``'s dtype.
    """
    implementation = _block_self_attention_op if qkv.is_cuda else block_self_attention_torch
    return implementation(qkv, q_weight, k_weight, rope, eps, num_heads)
