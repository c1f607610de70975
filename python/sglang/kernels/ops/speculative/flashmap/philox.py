"""Counter-based random bits: Philox-4x32-10.

The generator is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
A draw is a function of a 64-bit key and a 128-bit counter and of nothing else, so a request draws
the same numbers alone or in any batch, in the kernel or in the reference. The drafter's layout:

- key: the request's seed, low word first;
- counter word 0: the element's index divided by four; the remainder picks one of the four output
  words;
- counter word 1: the stream, which keeps users of one seed apart (``SAMPLER_STREAM``);
- counter words 2 and 3: the offset (which step and slot the draw is for), low word first.

``philox_words`` is the layout inside a Triton kernel, ``philox_torch`` its reference.
"""

import torch
import triton
import triton.language as tl

SAMPLER_STREAM = 1

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, quads: torch.Tensor, stream: int
) -> torch.Tensor:
    """Four random 32-bit words for each of ``quads``.

    Args:
        seeds: int64, broadcastable with ``quads``; all 64 bits count.
        offsets: int64, broadcastable with ``quads``; all 64 bits count.
        quads: int64 in ``[0, 2**32)``, counter word 0.
        stream: counter word 1.

    Returns:
        int64 in ``[0, 2**32)``, of the broadcast shape with a last dimension of 4.
    """
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    c0, c1, c2, c3 = quads, stream, offsets & _WORD, (offsets >> 32) & _WORD
    for _ in range(_ROUNDS):
        # An int64 product may wrap around; its bits are those of the unsigned product all the same.
        # Low words keep their high bits until they are used.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0) & _WORD
        c2 = ((product0 >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack((c0, c1 & _WORD, c2, c3 & _WORD), dim=-1)


@triton.jit
def philox_words(seed, offset, quads, stream):
    """Four int32 words for each of int32 ``quads``; ``seed`` and ``offset`` int64 scalars."""
    zero = quads * 0
    offset_low = zero + (offset & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    offset_high = zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.philox(seed, quads, zero + stream, offset_low, offset_high)
