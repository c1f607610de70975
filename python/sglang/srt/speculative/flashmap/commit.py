"""``Committer``: what a step accepted becomes the state that the next one reads.

Verify windows hold a row per tree node. Accepted rows are brought to the front of their windows, in
path order: KV is moved between slots, never computed anew, and the target's hidden states, gathered
along the path, become draft context at the same slots. Slots are single tokens, so pages of any
size, the radix cache and retraction see nothing but a committed prefix. Where the paths are known
to be in place (chains) nothing moves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.speculative.flashmap.accepted_kv import move_accepted
from sglang.kernels.ops.speculative.flashmap.accepted_rows import accepted_rows
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector
from sglang.srt.speculative.dspark_components.dspark_planner import VerifyWindow
from sglang.srt.speculative.flashmap.verify import Accepted

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator


@functools.cache
def first_rows(batch: int, width: int, device: torch.device) -> torch.Tensor:
    """The rows of anchors in verify windows of ``width`` rows: ``(batch,)`` int64, kept for
    good."""
    return torch.arange(0, batch * width, width, device=device)


class Committer:
    """Commits the accepted rows of verify windows of ``width`` slots."""

    def __init__(
        self,
        injector: TargetHiddenKvInjector,
        allocator: "BaseTokenToKVPoolAllocator",
        width: int,
    ) -> None:
        self._injector = injector
        self._pool = allocator.get_kvcache()
        self._width = width

    def commit(
        self,
        window: VerifyWindow,
        hidden: torch.Tensor,
        accepted: Accepted,
        commit_lens: torch.Tensor,
    ) -> None:
        """Move what ``accepted`` keeps; ``hidden (B · W, layers · H)``, ``commit_lens (B,)``.

        To be called in the step itself, before its lengths are published: afterwards slots may be
        given away, and the next target forward overwrites the hidden states.
        """
        batch, width = len(commit_lens), self._width
        cache_loc = self._injector.ids_for(window.kv_loc_plan).view(batch, width)
        positions = window.positions_2d
        if (path := accepted.path) is not None:
            self._move_kv(window.verify_cache_loc_2d, path)
            hidden, cache_loc, positions = accepted_rows(hidden, path, cache_loc, positions)
        self._injector.inject_target_hidden(
            target_hidden=hidden,
            cache_loc=cache_loc.view(-1),
            cache_loc_2d=cache_loc,
            positions=positions.view(-1),
            commit_lens=commit_lens,
        )

    def _move_kv(self, slots: torch.Tensor, path: torch.Tensor) -> None:
        pool = self._pool
        # Others keep scales beside the rows or have another layout, and move those themselves.
        if type(pool) is MHATokenToKVPool and not (pool.use_hnd or pool.is_quantized_kv_cache):
            keys, values = list(pool.k_buffer), list(pool.v_buffer)
            one_size = keys[0].shape == values[0].shape
            for buffers in (keys + values,) if one_size else (keys, values):
                move_accepted(buffers, slots, path)
            return
        depth = torch.arange(path.shape[1], device=path.device)
        node = torch.maximum(path.to(torch.int64), depth)
        target = slots[:, : path.shape[1]].reshape(-1)
        pool.move_kv_cache(target, slots.gather(1, node).view(-1))
