"""An engine in a process of its own, so that several can answer in turn on one machine."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One answer; `seconds` by the engine's clock, `steps` decode or verify steps."""

    seconds: float
    tokens: list[int]
    steps: int


class EngineProcess:
    """`sglang.Engine(**arguments)` with `environment` set; ready once made.

    `by_cpu`: seconds are the processor time of the engine's processes, in which waiting for a core
    does not count, instead of time passed.
    """

    def __init__(
        self, arguments: dict[str, Any], environment: dict[str, str], by_cpu: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, arguments, environment, by_cpu), daemon=False
        )
        self._process.start()
        theirs.close()
        try:
            self._pipe.recv()
        except EOFError:
            raise SystemExit(f"error: the engine did not start with {arguments}") from None

    def answer(self, prompt: list[int], **sampling: Any) -> Answer:
        """Continues token ids; `sampling` are sglang's sampling parameters."""
        self._pipe.send((prompt, sampling))
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(
    pipe: Connection, arguments: dict[str, Any], environment: dict[str, str], by_cpu: bool
) -> None:
    os.environ.update(environment)
    import psutil
    import sglang

    engine = sglang.Engine(**arguments)
    me = psutil.Process()

    def cpu_seconds() -> float:
        times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    clock = cpu_seconds if by_cpu else time.perf_counter
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        prompt, sampling = job
        start = clock()
        output = engine.generate(input_ids=prompt, sampling_params=sampling)
        seconds = clock() - start
        tokens = output["output_ids"]
        steps = output["meta_info"].get("spec_verify_ct") or len(tokens) - 1
        pipe.send(Answer(seconds, tokens, steps))
    engine.shutdown()
