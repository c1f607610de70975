"""Two servers that the soak's short version shares: chains, and trees with overlap scheduling."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Server
from soak_catalog import SHORT, Request, at_the_limit, catalog
from soak_servers import TREES, Models, answer_all

ARGS = ("--context-length", SHORT, "--max-total-tokens", 2048, "--max-running-requests", 16)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def asked(models: Models) -> tuple[list[Request], list[Request]]:
    """Requests of all kinds, and some around the context limit; what is greedy has the answer of a
    server without speculation."""
    requests = catalog(60, context=SHORT, seed=5)
    edges = at_the_limit(SHORT, seed=1)
    # Overlapped with the next step, plain decoding misses a token in its penalties.
    with models.plain(*ARGS, "--disable-overlap-schedule") as plain:
        answer_all(plain, [request for request in requests if request.greedy])
        answer_all(plain, edges, refused=True)
    return requests, edges


@pytest.fixture(scope="session")
def requests(asked: tuple[list[Request], list[Request]]) -> list[Request]:
    return asked[0]


@pytest.fixture(scope="session")
def chains(models: Models, requests: list[Request]) -> Iterator[Server]:
    oracle = models.oracle([request for request in requests if request.greedy])
    with models.flashmap(oracle, *ARGS) as started:
        yield started


@pytest.fixture(scope="session")
def trees(models: Models, chains: Server) -> Iterator[Server]:
    """Of the same draft; its scheduler sees results one step late."""
    with models.flashmap(models.folder / "oracle", *ARGS, *TREES, overlapped=True) as started:
        assert "'disable_overlap_schedule': False" in started.log()
        yield started


@pytest.fixture(params=["chains", "trees"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of both in turn."""
    return request.getfixturevalue(request.param)
