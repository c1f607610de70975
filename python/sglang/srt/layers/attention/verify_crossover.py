"""Where split-KV verify attention is the best choice, by measurement.

``benchmark/flashmap/verify_attention.py --json FILE`` measures it beside fa3, flashinfer and
upstream's Triton kernel, and ``--crossover FILE`` prints the table below from that. Batch sizes up
to one are in, for requests up to a context, if split-KV takes at most 10 % longer than the fastest
other at every context up to there that was measured with any of them, and less on (geometric)
average: a server knows the longest context a request may have, not those it will have.
A GPU, a head width or a number of rows that was not measured is no reason to leave the attention
backend that the server would have used.
"""

from __future__ import annotations

from typing import Optional

HEAD_DIM = 128
# Compute capability -> (tree, rows = W * heads / key heads) -> longest context -> most requests,
# as measured up to LARGEST_BATCH. Numbers of rows down to CLOSE of a measured one count as
# measured: the kernel pads them to its blocks. Beyond FAR, where reading the prefix is all that
# counts, contexts are like it.
LARGEST_BATCH, CLOSE, FAR = 64, 0.75, 32768
UP_TO: dict[tuple[int, int], dict[tuple[bool, int], dict[int, int]]] = {
    # An H200: docs/benchmarks.md, "Verify attention alone".
    (9, 0): {
        (True, 36): {8192: 64},
        (True, 68): {2048: 64, 8192: 4, 32768: 0},
        (True, 132): {8192: 64},
        (True, 260): {2048: 64, 32768: 16},
    },
}


def prefers_splitkv(
    capability: tuple[int, int],
    *,
    tree: bool,
    rows: int,
    head_dim: int,
    requests: Optional[int],
    context: int,
) -> bool:
    """Whether split-KV verify is the choice for up to ``requests`` running requests (None: any).

    Args:
        capability: the GPU's compute capability.
        tree: whether verify inputs carry a mask.
        rows: query rows a key head, ``W * heads / key heads``.
        head_dim: of the target.
        requests: most requests that run at once.
        context: most tokens that a request may have.
    """
    measured = sorted(
        (known, by_context)
        for (is_tree, known), by_context in UP_TO.get(capability, {}).items()
        if is_tree == tree and CLOSE * known <= rows <= known
    )
    if head_dim != HEAD_DIM or not measured:
        return False
    by_context = measured[0][1]
    reached = [most for longest, most in sorted(by_context.items()) if min(context, FAR) <= longest]
    return bool(reached) and min(requests or LARGEST_BATCH, LARGEST_BATCH) <= reached[0]
