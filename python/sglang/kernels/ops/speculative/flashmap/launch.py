"""Programmatic dependent launch: a kernel may start before the one in front of it has ended.

A draft is some sixty kernels of a few microseconds, so the gaps between one's last store and the
next one's first load add up. On sm_90 and later a kernel launched with ``launch_pdl`` starts when
every program of its predecessor has let it (or ended), and blocks in ``wait_for_inputs`` until the
predecessor has ended and its stores are visible.

A program lets its successor start once it has waited itself. So when a kernel starts, all but the
one in front of it have ended, and before it waits it may read whatever those wrote: weights, the
context, a residual of the branch before. What it reads there comes from memory, a microsecond away,
while the kernel in front still works. (Letting it start at once lets more kernels queue up, but
each of them could read weights only: 609 us a draft instead of 556 on an H200.) It may write only
after it has waited, so buffers may be reused as in a stream without overlap. Kernels of other
libraries end before ours go on, as ever.

Scratch that launches share would be shared by two streams at once where a draft forks
(``srt/speculative/flashmap/side_stream.py``): a ``lane`` has its own.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_lane = 0


@contextlib.contextmanager
def lane(number: int) -> Iterator[None]:
    """Launches in this context use the scratch of lane ``number``."""
    global _lane
    before, _lane = _lane, number
    try:
        yield
    finally:
        _lane = before


def current_lane() -> int:
    return _lane


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Wait for the kernel in front, then let the next one start. Before it: reads of what the
    kernel in front does not write. After it: everything else."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on ``device`` start before their predecessors end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a kernel with a ``DEPENDENT`` argument is launched with on ``device``."""
    dependent = dependent_launch(device)
    return {"DEPENDENT": dependent, "launch_pdl": dependent}
