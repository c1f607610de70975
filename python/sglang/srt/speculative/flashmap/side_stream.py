"""``SideStream``: work that a draft needs only later, beside what comes before that.

The anchors' context entries take four kernels, and one of them reads 100 MB of weights; the first
layer's self-attention does not need them. On a stream of their own they fill the memory's time
between small kernels that wait for each other. Captured into a graph, the fork becomes a branch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from sglang.kernels.ops.speculative.flashmap.launch import lane


class SideStream:
    """Of a CUDA ``device``; its tensors may be read on the main stream after ``mark``'s event."""

    def __init__(self, device: torch.device | str) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched here runs after what was launched before, beside what comes after."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), lane(1):
            yield

    def mark(self) -> torch.cuda.Event:
        """An event that ``wait`` of the main stream joins with what was launched on this one."""
        return self._stream.record_event()
