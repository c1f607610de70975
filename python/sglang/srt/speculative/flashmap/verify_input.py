"""The verify forward's input, in the layouts that attention backends read.

A chain is upstream's ``DFlashVerifyInput``: causal, without a mask. A tree adds the mask and
positions of its nodes. There are two layouts of the mask: ``QLEN_ONLY``, the ``(B, W, W)`` mask as
it is, which torch_native and kernels of our own read; and ``FULL_MASK``, which has the committed
prefix in every row (``kernels/ops/speculative/flashmap/full_mask.py``), which flashinfer and
upstream's Triton kernel read. fa3 reads tables that are made from the former
(``layers/attention/tree_fa3_backend.py``). A backend says which one by the ``verify_mask`` it owns;
one that owns none reads upstream's default of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.speculative.flashmap.full_mask import write_full_mask
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """``DFlashVerifyInput`` of a tree; ``custom_mask`` is one of the two layouts, flat."""

    topk: int = 2

    @property
    def tree_topk(self) -> int:
        """Irregular: no fixed number of children."""
        return -1


def backend_mask(
    tree: TreePlan,
    backend: "AttentionBackend",
    *,
    prefix_lens: torch.Tensor,
    lens_bound: torch.Tensor,
) -> torch.Tensor:
    """The trees' mask, flat, in the layout that ``backend`` reads; no wait for the device.

    Args:
        tree: trees of ``B`` requests.
        prefix_lens: committed tokens ``(B,)`` on the device.
        lens_bound: a bound of them ``(B,)`` on the host, which sizes the layout.
    """
    batch, width, _ = tree.mask.shape
    owned = backend.verify_mask
    mode = default_tree_mask_mode() if owned is None else owned.mode
    if mode == TreeMaskMode.QLEN_ONLY:
        return tree.mask.view(-1)
    if owned is None or not owned.fits(batch):
        return widened_mask(tree.mask, prefix_lens, tokens_bound=int(lens_bound.sum()))
    # In place: a graph reads the backend's own buffer.
    mask = owned.buffer[: width * (int(lens_bound.sum()) + batch * width)]
    write_full_mask(tree.mask, prefix_lens, mask)
    return mask


def widened_mask(
    mask: torch.Tensor, prefix_lens: torch.Tensor, *, tokens_bound: int
) -> torch.Tensor:
    """``mask (B, W, W)`` in the layout FULL_MASK, flat; ``tokens_bound`` bounds the sum of
    ``prefix_lens (B,)``."""
    batch, width, _ = mask.shape
    # Cells past the layout are read by no one, but flashinfer packs them.
    cells = width * (tokens_bound + batch * width)
    wide = torch.ones(cells, dtype=torch.bool, device=mask.device)
    write_full_mask(mask, prefix_lens, wide)
    return wide
