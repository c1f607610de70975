"""`make soak`: minutes of load and faults on servers of loopback, a table, status 1 for faults.

    python test/soak/run_soak.py [--minutes 10] [--requests 2000] [--folders 500] [--fuzz 500]

The target is tiny and in float32, so every greedy answer is known from a server without speculation
and must be met token by token. Phases stop early when their share of the time is over.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Sequence

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "scripts"), str(_ROOT / "test")]

from conftest import pytest_configure as use_built_tree  # noqa: E402

# Without overlap: overlapped with the next step, plain decoding misses a token in its penalties.
PLAIN = ("--context-length", 192, "--max-total-tokens", 16384, "--disable-overlap-schedule")
MAIN = ("--context-length", 192, "--max-total-tokens", 6144, "--max-running-requests", 24)
# Admits requests that the pool cannot hold to their ends; pages and block verification besides.
TINY = ("--context-length", 64, "--max-total-tokens", 512, "--schedule-conservativeness", 0.1,
        "--max-running-requests", 16, "--page-size", 16, "--speculative-use-block-verification",
        "--chunked-prefill-size", 32, "--enable-mixed-chunk")  # fmt: skip


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="bound of the whole run")
    parser.add_argument("--requests", type=int, default=2000, help="mixed requests, all phases")
    parser.add_argument("--folders", type=int, default=500, help="damaged draft folders")
    parser.add_argument("--identifiers", type=int, default=320, help="long copies; 32 at a time")
    parser.add_argument("--fuzz", type=int, default=500, help="fuzzed HTTP requests")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


class Clock:
    """Ends phases that outrun the bound."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def share(self, part: float) -> threading.Event:
        """An event that is set when `part` of the time that is left is over."""
        event = threading.Event()
        timer = threading.Timer(max(0.0, part * (self.end - time.monotonic())), event.set)
        timer.daemon = True
        timer.start()
        return event


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    use_built_tree(None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from soak_catalog import at_the_limit, catalog, identifiers, seeded
    from soak_phases import (
        damaged_folders,
        fuzzed_requests,
        limits,
        load,
        repeated,
        restart_under_load,
        together,
        watched,
    )
    from soak_report import Phase, table
    from soak_servers import TREES, Models, answer_all, metrics

    clock = Clock(args.minutes)
    phases: list[Phase] = []

    def done(phase: Phase) -> None:
        phases.append(phase)
        print(f"{phase.name}: {phase.faults} faults in {phase.seconds:.0f} s", flush=True)
        for note in phase.notes:
            if not note.startswith("refused"):
                print("  " + note[:600], flush=True)

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        models = Models(Path(folder))
        requests = catalog(200, context=192, seed=args.seed)
        short = catalog(100, context=64, seed=args.seed + 1)
        edges = at_the_limit(192, seed=args.seed)
        copies = identifiers(args.identifiers, seed=args.seed)
        known = [r for r in (*requests, *short, *copies) if r.greedy]
        with models.plain(*PLAIN) as plain:
            answer_all(plain, known)
            answer_all(plain, edges, refused=True)
        oracle = models.oracle([*known, *(r for r in edges if "output_ids" in r.expected)])

        with models.flashmap(oracle, *MAIN) as server:
            part = args.requests // 10
            with watched(server, "warm-up") as phase:
                load(server, phase, requests, part, seed=args.seed, until=clock.share(0.15))
            done(phase)
            with watched(server, "mixed") as phase:
                load(server, phase, requests, 4 * part, seed=2, until=clock.share(0.3))
            done(phase)
            with watched(server, "aborts and lost clients") as phase:
                load(server, phase, requests, 3 * part, seed=3, faults=0.4, until=clock.share(0.3))
            done(phase)
            with watched(server, "identifiers, 32 at a time") as phase:
                together(server, phase, copies, 32, clock.share(0.3))
            done(phase)
            with watched(server, "context limit") as phase:
                limits(server, phase, edges)
            done(phase)
            with watched(server, "fuzzed requests") as phase:
                fuzzed_requests(server, phase, args.fuzz, requests, until=clock.share(0.3))
            done(phase)
            with watched(server, "restart under load") as phase:
                restart_under_load(server, phase, requests, part)
            done(phase)
        with models.flashmap(oracle, *MAIN, *TREES) as server:
            with watched(server, "trees") as phase:
                load(server, phase, requests, 2 * part, seed=9, until=clock.share(0.3))
            done(phase)
            with watched(server, "trees, aborts and lost clients") as phase:
                load(server, phase, requests, 2 * part, seed=10, faults=0.4, until=clock.share(0.3))
            done(phase)
            with watched(server, "trees, context limit") as phase:
                limits(server, phase, edges)
            done(phase)
        for name, overlapped, trees in (
            ("", False, ()),
            (", overlapped", True, ()),
            (", overlapped, trees", True, TREES),
        ):
            with models.flashmap(oracle, *TINY, *trees, overlapped=overlapped) as server:
                with watched(server, f"retraction in a tiny pool{name}") as phase:
                    load(server, phase, short, part, seed=5, faults=0.2, until=clock.share(0.3))
                    if not metrics(server).get("num_retracted_requests_total"):
                        phase.count("wrong", "no request was retracted, so nothing was tested")
                done(phase)
        with models.flashmap(
            models.untrained, *MAIN, "--speculative-flashmap-num-steps", 2
        ) as server:
            with watched(server, "seeds") as phase:
                repeated(server, phase, seeded(max(1, part // 4), context=192, seed=6), 4)
            done(phase)
        phase = Phase("damaged draft folders")
        damaged_folders(phase, models, args.folders, random.Random(args.seed), clock.share(1.0))
        done(phase)

    print()
    print(table(phases))
    return 1 if any(phase.faults for phase in phases) else 0


if __name__ == "__main__":
    sys.exit(main())
