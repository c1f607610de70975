"""Where split-KV verify attention is the best choice, by measurement.

``benchmark/flashmap/verify_attention.py --json FILE`` measures it beside fa3, flashinfer and
upstream's Triton kernel, and ``--crossover FILE`` prints the table below from that. A batch size is
in if, at every context measured, split-KV takes at most 5 % longer than the fastest other. A GPU, a
head width or a number of rows that was not measured is no reason to leave the attention backend
that the server would have used.
"""

from __future__ import annotations

from typing import Optional

HEAD_DIM = 128
# Compute capability -> (tree, rows = W * heads / key heads) -> most requests, as measured up to
# LARGEST_BATCH.
LARGEST_BATCH = 64
UP_TO: dict[tuple[int, int], dict[tuple[bool, int], int]] = {}


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
        rows: query rows a key head, ``W * heads / key heads``; taken as the next that was measured.
        head_dim: of the target.
        requests: most requests that run at once.
    """
    measured = sorted(
        (known, most)
        for (is_tree, known), most in UP_TO.get(capability, {}).items()
        if is_tree == tree and known >= rows
    )
    if head_dim != HEAD_DIM or not measured:
        return False
    return (LARGEST_BATCH if requests is None else min(requests, LARGEST_BATCH)) <= measured[0][1]
