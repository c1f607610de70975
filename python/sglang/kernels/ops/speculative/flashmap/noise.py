"""Counter-based random numbers: Philox-4x32-10 keyed by (seed, offset), no state, no buffers.

A draw depends on its row's 64-bit ``seed`` and ``offset``, a ``stream`` and its column only, so a
request's numbers are the same alone or in a batch, on every rank, eager or in a CUDA graph.
Counter layout: ``(offset low, offset high, column // 4, stream)``, key ``(seed low, seed high)``;
the four 32-bit outputs serve columns ``4c … 4c + 3``. Philox: Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3" (SC 2011); the same function as Triton's ``tl.philox``.

``gaussian_noise`` turns output pairs into normals by Box-Muller, ``uniform_noise`` takes the upper
24 bits as a number in (0, 1). The torch reference computes Philox in int64; uniforms are equal bit
for bit, normals within the float32 rounding of log, sqrt, cos and sin.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang.srt.utils.custom_op import register_custom_op

_MASK32 = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_BLOCK_COUNTERS = 256


def _mul_hi_lo(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of ``a * b`` for ``a`` and ``b`` below 2^32, in int64 arithmetic."""
    low_product = (a & 0xFFFF) * b  # < 2^48
    high_product = (a >> 16) * b  # < 2^48
    carry = (low_product >> 16) + (high_product & 0xFFFF)
    high = (high_product >> 16) + (carry >> 16)
    low = ((carry & 0xFFFF) << 16) | (low_product & 0xFFFF)
    return high & _MASK32, low & _MASK32


def philox_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, columns: torch.Tensor, stream: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit outputs (int64 tensors in [0, 2^32)) of broadcast int64 inputs."""
    seeds, offsets, columns = torch.broadcast_tensors(seeds, offsets, columns)
    key_a, key_b = seeds & _MASK32, (seeds >> 32) & _MASK32
    c0, c1 = offsets & _MASK32, (offsets >> 32) & _MASK32
    c2, c3 = columns & _MASK32, torch.full_like(columns, stream)
    for _ in range(10):
        high_b, low_b = _mul_hi_lo(c2, _ROUND_B)
        high_a, low_a = _mul_hi_lo(c0, _ROUND_A)
        c0, c1, c2, c3 = high_b ^ c1 ^ key_a, low_b, high_a ^ c3 ^ key_b, low_a
        key_a, key_b = (key_a + _KEY_A) & _MASK32, (key_b + _KEY_B) & _MASK32
    return c0, c1, c2, c3


def _unit_torch(bits: torch.Tensor) -> torch.Tensor:
    """A float32 in (0, 1) from the upper 24 bits of 32."""
    return ((bits >> 8).float() + 0.5) * (1.0 / (1 << 24))


def _counters(width: int, device: torch.device) -> torch.Tensor:
    return torch.arange((width + 3) // 4, device=device, dtype=torch.int64)


def uniform_noise_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """Reference of :func:`uniform_noise`."""
    bits = philox_torch(
        seeds[:, None], offsets[:, None], _counters(width, seeds.device)[None], stream
    )
    return torch.stack([_unit_torch(b) for b in bits], dim=-1).flatten(1)[:, :width].contiguous()


def gaussian_noise_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """Reference of :func:`gaussian_noise`."""
    bits = philox_torch(
        seeds[:, None], offsets[:, None], _counters(width, seeds.device)[None], stream
    )
    u0, u1, u2, u3 = (_unit_torch(b) for b in bits)
    r0, r1 = (-2.0 * u0.log()).sqrt(), (-2.0 * u2.log()).sqrt()
    a0, a1 = u1 * (2.0 * math.pi), u3 * (2.0 * math.pi)
    normals = (r0 * a0.cos(), r0 * a0.sin(), r1 * a1.cos(), r1 * a1.sin())
    return torch.stack(normals, dim=-1).flatten(1)[:, :width].contiguous()


@triton.jit
def _unit(bits):
    return ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)


@triton.jit
def _noise_kernel(
    seeds_ptr,
    offsets_ptr,
    out_ptr,
    width,
    stream,
    GAUSSIAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    counter = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + row)
    offset = tl.load(offsets_ptr + row)
    zero = tl.zeros([BLOCK], tl.int32)
    b0, b1, b2, b3 = tl.philox(
        seed.to(tl.uint64),
        (zero + offset.to(tl.int32)).to(tl.uint32),
        (zero + (offset >> 32).to(tl.int32)).to(tl.uint32),
        counter.to(tl.uint32),
        (zero + stream).to(tl.uint32),
    )
    v0, v1, v2, v3 = _unit(b0), _unit(b1), _unit(b2), _unit(b3)
    if GAUSSIAN:
        two_pi: tl.constexpr = 6.283185307179586
        r0 = tl.sqrt(-2.0 * tl.log(v0))
        r1 = tl.sqrt(-2.0 * tl.log(v2))
        v0, v1 = r0 * tl.cos(v1 * two_pi), r0 * tl.sin(v1 * two_pi)
        v2, v3 = r1 * tl.cos(v3 * two_pi), r1 * tl.sin(v3 * two_pi)
    column = 4 * counter
    out = out_ptr + row * width + column
    tl.store(out, v0, mask=column < width)
    tl.store(out + 1, v1, mask=column + 1 < width)
    tl.store(out + 2, v2, mask=column + 2 < width)
    tl.store(out + 3, v3, mask=column + 3 < width)


def _noise_triton(seeds, offsets, width: int, stream: int, gaussian: bool) -> torch.Tensor:
    assert seeds.is_contiguous() and offsets.is_contiguous()
    assert seeds.dtype == offsets.dtype == torch.int64
    out = torch.empty(seeds.shape[0], width, dtype=torch.float32, device=seeds.device)
    if out.numel() == 0:
        return out
    grid = (seeds.shape[0], triton.cdiv((width + 3) // 4, _BLOCK_COUNTERS))
    _noise_kernel[grid](
        seeds, offsets, out, width, stream, GAUSSIAN=gaussian, BLOCK=_BLOCK_COUNTERS
    )
    return out


def uniform_noise_triton(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """:func:`uniform_noise` by the Triton kernel."""
    return _noise_triton(seeds, offsets, width, stream, gaussian=False)


def gaussian_noise_triton(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """:func:`gaussian_noise` by the Triton kernel."""
    return _noise_triton(seeds, offsets, width, stream, gaussian=True)


def _noise_fake(seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int) -> torch.Tensor:
    return seeds.new_empty(seeds.shape[0], width, dtype=torch.float32)


@register_custom_op(op_name="flashmap_uniform_noise", fake_impl=_noise_fake)
def _uniform_noise_op(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    return uniform_noise_triton(seeds, offsets, width, stream)


@register_custom_op(op_name="flashmap_gaussian_noise", fake_impl=_noise_fake)
def _gaussian_noise_op(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    return gaussian_noise_triton(seeds, offsets, width, stream)


def uniform_noise(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """Uniform draws in (0, 1): int64 ``seeds (R,)`` and ``offsets (R,)`` -> float32 ``(R, width)``."""
    op = _uniform_noise_op if seeds.is_cuda else uniform_noise_torch
    return op(seeds, offsets, width, stream)


def gaussian_noise(
    seeds: torch.Tensor, offsets: torch.Tensor, width: int, stream: int
) -> torch.Tensor:
    """Standard normal draws: int64 ``seeds (R,)`` and ``offsets (R,)`` -> float32 ``(R, width)``."""
    op = _gaussian_noise_op if seeds.is_cuda else gaussian_noise_torch
    return op(seeds, offsets, width, stream)


__all__ = [
    "gaussian_noise",
    "gaussian_noise_torch",
    "gaussian_noise_triton",
    "philox_torch",
    "uniform_noise",
    "uniform_noise_torch",
    "uniform_noise_triton",
]
