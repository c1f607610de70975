"""The phases of the soak: load with faults, and what must hold when it is over."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterator, Sequence

from serving import Server
from soak_catalog import Request
from soak_client import Outcome, ask
from soak_report import Phase
from soak_servers import resident_bytes, tracebacks, what_is_left

CLIENTS = 24
FAULTS = ("abort", "leave", "leave-at-once")


@contextlib.contextmanager
def watched(server: Server, name: str, *, idle: bool = True) -> Iterator[Phase]:
    """Time a phase and look at the server before and after it."""
    phase = Phase(name)
    before, errors = resident_bytes(server), tracebacks(server)
    start = time.monotonic()
    yield phase
    phase.seconds = time.monotonic() - start
    try:
        left = what_is_left(server) if idle else []
    except (OSError, ValueError) as error:
        left = [f"the server does not answer: {error}"]
    for thing in left:
        phase.count("leaked", thing)
    for _ in range(tracebacks(server) - errors):
        phase.count("errors", "a traceback in the server's log")
    phase.growth = resident_bytes(server) - before


def difference(request: Request, answer: dict[str, Any]) -> str:
    """In which way `answer` is not the one expected; empty if it is."""
    meta = answer["meta_info"]
    if meta["completion_tokens"] != len(answer["output_ids"]):
        return f"completion_tokens {meta['completion_tokens']}, ids {len(answer['output_ids'])}"
    if request.expected is None:
        limit = request.params["max_new_tokens"]
        if not 1 <= len(answer["output_ids"]) <= limit:
            return f"{len(answer['output_ids'])} tokens of {limit}"
        if meta["finish_reason"]["type"] == "length" and len(answer["output_ids"]) != limit:
            return "ends early for its length"
        return ""
    for key in ("output_ids", "text"):
        if answer[key] != request.expected[key]:
            return f"{key} {answer[key]} instead of {request.expected[key]}"
    if meta["finish_reason"] != request.expected["meta_info"]["finish_reason"]:
        return f"finish_reason {meta['finish_reason']}"
    for name in ("output_token_logprobs", "output_top_logprobs"):
        theirs = request.expected["meta_info"].get(name)
        if theirs and not close(meta[name], theirs):
            return f"{name} {meta[name]} instead of {theirs}"
    return ""


def close(mine: Any, theirs: Any) -> bool:
    """Whether nested lists of log-probabilities and ids agree to 1e-3."""
    if isinstance(theirs, list):
        pairs = zip(mine, theirs, strict=True)
        return len(mine) == len(theirs) and all(close(a, b) for a, b in pairs)
    return abs(mine - theirs) < 1e-3 if isinstance(theirs, float) else mine == theirs


def judge(phase: Phase, request: Request, outcome: Outcome, fault: str | None) -> None:
    """Count one outcome."""
    if fault and (outcome.left or outcome.finish == "abort"):
        phase.count("aborted")
        expected = request.expected and request.expected["output_ids"]
        ids = outcome.answer.get("output_ids", [])
        if expected and ids != expected[: len(ids)]:
            phase.count("wrong", f"{request.payload}: aborted after {ids}, not {expected}")
    elif outcome.status is None or outcome.status >= 500 or outcome.finish == "abort":
        phase.count("lost", f"{request.payload}: {outcome}")
    elif outcome.status >= 400:
        phase.count("refused", str(outcome.answer)[:200])
    elif reason := difference(request, outcome.answer):
        phase.count("wrong", f"{request.kind} {request.payload}: {reason}")


def load(
    server: Server,
    phase: Phase,
    requests: Sequence[Request],
    count: int,
    *,
    seed: int,
    faults: float = 0.0,
    until: threading.Event | None = None,
) -> None:
    """`count` random requests of the catalog from `CLIENTS` clients, a share `faults` of them faulty.

    Half the patient ones stream. `until` ends the load early.
    """
    rng = random.Random(seed)
    jobs = []
    for index in range(count):
        fault = rng.choice(FAULTS) if rng.random() < faults else None
        jobs.append((index, rng.choice(requests), fault, random.Random(rng.random())))

    def run(job: tuple[int, Request, str | None, random.Random]) -> None:
        index, request, fault, own = job
        if until is not None and until.is_set():
            return
        phase.count("requests")
        judge(phase, request, submit(server, request, f"{seed}-{index}", fault, own), fault)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(run, jobs))


def submit(
    server: Server, request: Request, name: str, fault: str | None, rng: random.Random
) -> Outcome:
    """Send one request, and let it or its client end early for a fault."""
    stream = fault is not None or rng.random() < 0.5
    payload = request.payload | {"rid": name, "stream": stream}
    if fault == "abort":
        started = threading.Event()
        pause = rng.uniform(0, 0.3)

        def abort() -> None:
            started.wait(10)
            time.sleep(pause)
            ask(server.port, "/abort_request", {"rid": name})

        thread = threading.Thread(target=abort)
        thread.start()
        outcome = ask(server.port, "/generate", payload, started=started)
        started.set()
        thread.join()
        return outcome
    if fault == "leave":
        return ask(server.port, "/generate", payload, leave_after=rng.randint(1, 4))
    if fault == "leave-at-once":
        return ask(server.port, "/generate", payload, leave_after=0)
    return ask(server.port, "/generate", payload)
