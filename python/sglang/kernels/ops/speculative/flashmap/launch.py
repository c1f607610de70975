"""Programmatic dependent launch: a kernel may start before the one in front of it has ended.

A draft is some eighty kernels of a few microseconds, so the gaps between one's last store and the
next one's first load add up. On sm_90 and later a kernel launched with ``launch_pdl`` starts when
every program of its predecessor has called ``launch_dependents`` (or ended), and blocks in
``wait_for_inputs`` until the predecessor has ended and its stores are visible. In between it may
read constants only: weights, and nothing that an earlier kernel writes. Kernels load theirs there:
what no step before has touched comes from memory, a microsecond away.

Every kernel launched so waits before it reads or writes anything else, whatever came before it. So
when one has ended, all that were launched before it have, and buffers may be reused as in a stream
without overlap. Kernels of other libraries end before ours go on, as ever.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def launch_dependents(DEPENDENT: tl.constexpr):
    """Let the next kernel start; first thing in a kernel."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Wait for the kernels before this one; before anything they write is read."""
    if DEPENDENT:
        gdc_wait()


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on ``device`` start before their predecessors end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a kernel with a ``DEPENDENT`` argument is launched with on ``device``."""
    dependent = dependent_launch(device)
    return {"DEPENDENT": dependent, "launch_pdl": dependent}
