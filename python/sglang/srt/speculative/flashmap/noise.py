"""The randomness of FLASHMAP: which numbers a request draws, and the law of the draft's noise.

Every draw is a pure function of a request's 64-bit seed, its anchor's position and what the draw
is for (``Stream``), see ``kernels/ops/speculative/flashmap/noise.py``. A request with a sampling
seed therefore drafts and samples the same alone or in a batch. A position is an anchor once, so no
number is ever used twice: reusing one after an accept decision looked at it would bias the output.
``SeedTable`` holds the seeds on the device, indexed like ``req_to_token``; a decode step reads them
without the host.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Sequence

import torch
from sglang.kernels.ops.speculative.flashmap.draft_rows import ROWS_PER_ANCHOR

_VOCAB_CHUNK = 8192


class Stream(IntEnum):
    """What a draw is for; different streams of one (seed, offset) are independent."""

    DRAFT_NOISE = 2  # 1 is what the sampler draws from when it is not told
    ACCEPT_COIN = 3
    DRAFT_TOKEN = 4
    TARGET_TOKEN = 5
    BANK_ROW = 6


def row_offsets(anchors: torch.Tensor, rows: int) -> torch.Tensor:
    """Draw offsets ``(B · rows,)`` of the rows of each anchor position ``anchors (B,)``."""
    assert rows <= ROWS_PER_ANCHOR
    index = torch.arange(rows, device=anchors.device, dtype=torch.int64)
    return (anchors.to(torch.int64)[:, None] * ROWS_PER_ANCHOR + index).reshape(-1)


def request_seed(rid: str, sampling_seed: int | None, server_seed: int) -> int:
    """A request's 64-bit seed: from its sampling seed, else from its id and the server's seed."""
    text = f"seed:{sampling_seed}" if sampling_seed is not None else f"rid:{server_seed}:{rid}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class SeedTable:
    """Device seeds ``(rows,)`` int64 of the requests in each ``req_to_token`` row.

    ``default_seed``: the sampling seed of requests that have none; None: they differ.
    """

    def __init__(
        self,
        rows: int,
        device: torch.device | str,
        server_seed: int,
        default_seed: int | None = None,
    ) -> None:
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._server_seed = server_seed
        self._default_seed = default_seed

    def place(self, reqs: Sequence, req_pool_indices: torch.Tensor) -> None:
        """Record the seeds of ``reqs``, which hold rows ``req_pool_indices (B,)``."""
        asked = [(req.rid, req.sampling_params.sampling_seed) for req in reqs]
        values = torch.tensor(
            [
                request_seed(rid, self._default_seed if seed is None else seed, self._server_seed)
                for rid, seed in asked
            ],
            dtype=torch.int64,
            pin_memory=self.seeds.is_cuda,
        )
        self.seeds[req_pool_indices.long()] = values.to(self.seeds.device, non_blocking=True)


def embedding_gram(embedding: torch.Tensor) -> torch.Tensor:
    """``EᵀE (H, H)`` float64 of ``embedding`` ``E (V, H)``."""
    hidden = embedding.shape[1]
    gram = torch.zeros(hidden, hidden, dtype=torch.float64, device=embedding.device)
    for rows in embedding.split(_VOCAB_CHUNK):
        rows = rows.double()
        gram.addmm_(rows.T, rows)
    return gram


def noise_factor(embedding: torch.Tensor) -> torch.Tensor:
    """``F (H, H)`` float64 with ``F Fᵀ = EᵀE`` of ``embedding`` ``E (V, H)``.

    ``z @ Fᵀ`` with standard normal ``z`` then has the law of ``x0 @ E`` with ``x0 ~ N(0, I_V)``.
    Cholesky, or the symmetric eigendecomposition where ``EᵀE`` is singular.
    """
    gram = embedding_gram(embedding)
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) == 0 and bool(torch.isfinite(factor).all()):
        return factor
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp_min(0).sqrt()
