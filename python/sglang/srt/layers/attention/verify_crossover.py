"""Where split-KV verify attention is the best choice, by measurement.

``benchmark/flashmap/verify_attention.py --json FILE`` measures it beside fa3, flashinfer and
upstream's Triton kernel, and ``--crossover FILE`` prints the table below from that. Batch sizes up
to one are in if split-KV takes at most 10 % longer than the fastest other at every context that was
measured with any of them, and less on (geometric) average: a server does not know its contexts.
A GPU, a head width or a number of rows that was not measured is no reason to leave the attention
backend that the server would have used.
"""

from __future__ import annotations

from typing import Optional

HEAD_DIM = 128
# Compute capability -> (tree, rows = W * heads / key heads) -> most requests, as measured up to
# LARGEST_BATCH. Numbers of rows down to CLOSE of a measured one count as measured: the kernel pads
# them to its blocks.
LARGEST_BATCH, CLOSE = 64, 0.75
UP_TO: dict[tuple[int, int], dict[tuple[bool, int], int]] = {
    # An H200: docs/benchmarks.md, "Verify attention alone".
    (9, 0): {(False, 68): 0, (True, 68): 0, (False, 260): 0, (True, 260): 64},
}


def prefers_splitkv(
    capability: tuple[int, int],
    *,
    tree: bool,
    rows: int,
    head_dim: int,
    requests: Optional[int],
) -> bool:
    """Whether split-KV verify is the choice for up to ``requests`` running requests (None: any).

    Args:
        capability: the GPU's compute capability.
        tree: whether verify inputs carry a mask.
        rows: query rows a key head, ``W * heads / key heads``.
        head_dim: of the target.
        requests: most requests that run at once.
    """
    measured = sorted(
        (known, most)
        for (is_tree, known), most in UP_TO.get(capability, {}).items()
        if is_tree == tree and CLOSE * known <= rows <= known
    )
    if head_dim != HEAD_DIM or not measured:
        return False
    return (LARGEST_BATCH if requests is None else min(requests, LARGEST_BATCH)) <= measured[0][1]
