"""The phases of the soak: load with faults, and what must hold when it is over."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterator, Sequence

from fuzz_folders import PLANTED, draft_base, verdict, write_fuzzed
from fuzz_requests import fuzzed
from serving import Server
from soak_catalog import Request
from soak_client import Outcome, ask
from soak_report import Phase
from soak_servers import Models, resident_bytes, tracebacks, what_is_left

CLIENTS = 24
MAX_GROWTH = 100 << 20  # bytes of all processes in a phase; warming up takes about 20 MB
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
    if phase.growth > MAX_GROWTH:
        phase.count("leaked", f"{phase.growth / 1e6:.0f} MB of memory")


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
    """`count` random requests of the catalog from `CLIENTS` clients, a share `faults` faulty.

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
        # An abort ends every request whose id begins with the one it names.
        name = f"{seed}-{index:06}"
        judge(phase, request, submit(server, request, name, fault, own), fault)

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


def together(
    server: Server, phase: Phase, requests: Sequence[Request], clients: int, until: threading.Event
) -> None:
    """Each request once, `clients` at a time."""

    def run(request: Request) -> None:
        if not until.is_set():
            phase.count("requests")
            judge(phase, request, ask(server.port, "/generate", request.payload), None)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(run, requests))


def limits(server: Server, phase: Phase, requests: Sequence[Request]) -> None:
    """Requests around the context limit get the plain server's answer, or its refusal."""

    def run(request: Request) -> None:
        phase.count("requests")
        outcome = ask(server.port, "/generate", request.payload)
        if outcome.status == 400 and "output_ids" not in request.expected:
            phase.count("refused")
        elif outcome.status != 200:
            phase.count("lost", f"{request.payload}: {outcome}")
        elif "output_ids" not in request.expected:
            phase.count("wrong", f"{request.payload}: not refused, but {outcome.answer}")
        elif reason := difference(request, outcome.answer):
            phase.count("wrong", f"{request.payload}: {reason}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, requests))


def fuzzed_requests(
    server: Server,
    phase: Phase,
    count: int,
    known: Sequence[Request],
    *,
    first: int = 0,
    until: threading.Event | None = None,
) -> None:
    """Fuzzed requests are answered, whatever the answer; sane ones among them are not disturbed.

    A status of 500 or more counts as lost.
    """
    greedy = [r for r in known if r.greedy]

    def run(seed: int) -> None:
        if until is not None and until.is_set():
            return
        phase.count("requests")
        path, body = fuzzed(random.Random(seed))
        outcome = ask(server.port, path, body)
        if outcome.status is None or outcome.status >= 500:
            phase.count("lost", f"seed {seed}, {path} {body[:300]!r}: {outcome}")
        elif outcome.status >= 400:
            phase.count("refused")
        if seed % 10 == 0:
            request = greedy[seed % len(greedy)]
            phase.count("requests")
            judge(phase, request, ask(server.port, "/generate", request.payload), None)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(first, first + count)))


def restart_under_load(
    server: Server, phase: Phase, requests: Sequence[Request], count: int
) -> None:
    """End the server while it answers, start it again on its port, and ask as before.

    What was cut off counts as aborted; what was answered in full must be right.
    """
    cut = Phase("cut")
    stopping = threading.Event()
    thread = threading.Thread(
        target=load, args=(server, cut, requests, 10 * CLIENTS), kwargs=dict(seed=7, until=stopping)
    )
    thread.start()
    while cut.requests < 2 * CLIENTS and thread.is_alive():
        time.sleep(0.01)
    server.stop()
    stopping.set()
    thread.join()
    phase.requests += cut.requests
    phase.aborted += cut.lost
    phase.wrong += cut.wrong
    phase.notes += cut.notes if cut.wrong else []
    if not cut.lost:
        phase.count("wrong", "the restart cut no request off, so nothing was tested")
    server.start()
    load(server, phase, requests, count, seed=8)


def repeated(server: Server, phase: Phase, requests: Sequence[Request], times: int) -> None:
    """Every request, asked several times among the others, always gets its first answer."""
    for round_seed in range(times):
        rng = random.Random(round_seed)
        order = rng.sample(requests, len(requests))

        def run(request: Request) -> None:
            phase.count("requests")
            outcome = ask(server.port, "/generate", request.payload)
            if request.expected is not None or outcome.status != 200:
                judge(phase, request, outcome, None)
            else:
                request.expected = outcome.answer

        with ThreadPoolExecutor(rng.choice((1, 4, CLIENTS))) as pool:
            list(pool.map(run, order))


def damaged_folders(
    phase: Phase, models: Models, count: int, rng: random.Random, until: threading.Event
) -> None:
    """Every folder loads or is refused in one line; no code in it runs."""
    start = time.monotonic()
    first = rng.randrange(10**6)
    base = draft_base(models.untrained, models.folder / "base")
    for seed in range(first, first + count):
        if until.is_set():
            break
        folder = models.folder / f"damaged-{seed}"
        damage = write_fuzzed(folder, base, seed)
        phase.count("requests")
        try:
            message = verdict(models.target, folder, *(["--trust-remote-code"] if seed % 2 else []))
        except Exception as error:
            phase.count("lost", f"seed {seed}, {damage}: {type(error).__name__}: {error}")
        else:
            if "\n" in message:
                phase.count("wrong", f"seed {seed}, {damage}: {message}")
            elif message:
                phase.count("refused")
        planted = models.folder / PLANTED
        if planted.exists():
            phase.count("wrong", f"seed {seed}, {damage}: code of the folder ran")
            planted.rmdir()
        shutil.rmtree(folder)
    phase.seconds = time.monotonic() - start
