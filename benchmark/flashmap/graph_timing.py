"""``replay_times``: what a call takes on the GPU alone, without what launching it takes."""

from __future__ import annotations

from collections.abc import Callable

import torch


def replay_times(call: Callable[[int], object], calls: int, repeats: int) -> list[float]:
    """Microseconds of one of ``call(0)`` to ``call(calls - 1)`` in a CUDA graph of them.

    One for each of ``repeats`` replays, between two events; the first replay is left out.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return times
