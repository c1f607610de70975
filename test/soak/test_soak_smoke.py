"""A minute of the soak on two servers: load with faults, fuzzed requests, overlapped trees."""

from __future__ import annotations

from serving import Server
from soak_catalog import SHORT, Request, seeded
from soak_phases import fuzzed_requests, limits, load, repeated, watched
from soak_report import Phase


def assert_faultless(phase: Phase) -> None:
    assert not phase.faults, phase


def test_mixed_requests(chains: Server, requests: list[Request]) -> None:
    with watched(chains, "mixed") as phase:
        load(chains, phase, requests, 80, seed=1)
    assert_faultless(phase)


def test_aborts_and_lost_clients(chains: Server, requests: list[Request]) -> None:
    with watched(chains, "faults") as phase:
        load(chains, phase, requests, 80, seed=2, faults=0.5)
    assert_faultless(phase)
    assert phase.aborted > 10


def test_requests_that_end_at_the_context_limit(
    server: Server, asked: tuple[list[Request], list[Request]]
) -> None:
    with watched(server, "limits") as phase:
        limits(server, phase, asked[1])
    assert_faultless(phase)
    assert 0 < phase.refused < phase.requests


def test_fuzzed_requests(chains: Server, requests: list[Request]) -> None:
    with watched(chains, "fuzz") as phase:
        fuzzed_requests(chains, phase, 60, requests)
    assert_faultless(phase)


def test_overlapped_trees(trees: Server, requests: list[Request]) -> None:
    """All kinds, penalties and grammars among them, with aborts and lost clients between."""
    with watched(trees, "overlapped") as phase:
        load(trees, phase, requests, 120, seed=3, faults=0.3)
    assert_faultless(phase)


def test_seeds_on_overlapped_trees(trees: Server) -> None:
    """Matched or rejected on trees, alone or in any batch: a seed's text is the same."""
    with watched(trees, "seeds") as phase:
        repeated(trees, phase, seeded(16, context=SHORT, seed=5), 3)
    assert_faultless(phase)
