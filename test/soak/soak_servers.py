"""The servers of the soak: a tiny target, plain and with FLASHMAP, and what their gauges say."""

from __future__ import annotations

import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Sequence

from drafts.folders import PACKAGE, whole_block, write_oracle
from drafts.replay import Corruption, Reference
from serving import Server, with_habits
from soak_catalog import Request
from soak_client import ask
from tiny_model import CHAT_TEMPLATE, write_tiny_model

BLOCK_SIZE = 16
# Whole blocks, parts of blocks and nothing are accepted in turn.
CORRUPTION = Corruption((0.2, 0.06), seed=3)
# Of a slot's first choice over its second, in logits; a tree of 16 nodes then has several branches.
DOUBT = 1.5
# One draft's tree, grown from the choices of its slots.
TREES = ("--speculative-flashmap-tree-candidates", 1, "--speculative-flashmap-tree-choices", 8,
         "--speculative-num-draft-tokens", 17)  # fmt: skip
TEST_FOLDER = Path(__file__).resolve().parents[1]
COMMON = ("--dtype", "float32", "--random-seed", 0, "--enable-metrics")


class Models:
    """The tiny target and its drafts, in `folder`."""

    def __init__(self, folder: Path) -> None:
        from make_draft import main as make_draft  # imports the tree, which must have been built

        self.folder = folder
        self.target = write_tiny_model(
            folder / "target", seed=2, chat_template=CHAT_TEMPLATE, num_hidden_layers=3
        )
        self.untrained = folder / "untrained"
        sizes = ("--block-size", BLOCK_SIZE, "--hidden-size", 64, "--layers", 1, "--heads", 1)
        args = ("--target", self.target, "--output", self.untrained, *sizes)
        if make_draft([str(arg) for arg in args]):
            raise RuntimeError("the untrained draft could not be written")

    def oracle(self, requests: Sequence[Request]) -> Path:
        """A draft folder that replays the known answers of `requests`, now and then wrong."""
        references = [
            Reference(tuple(r.payload["input_ids"]), tuple(r.expected["output_ids"]))
            for r in requests
            if r.expected is not None
        ]
        folder = self.folder / "oracle"
        return write_oracle(folder, self.untrained, references, CORRUPTION, doubt=DOUBT)

    def plain(self, *args: object) -> Server:
        return Server("--model-path", self.target, *COMMON, *args, env=environment())

    def flashmap(self, draft: Path, *args: object, overlapped: bool = False) -> Server:
        server = Server(
            "--model-path", self.target, *COMMON,
            "--speculative-algorithm", "FLASHMAP",
            "--speculative-draft-model-path", draft,
            *whole_block(draft, args),
            *args,
            env=environment(),
        )  # fmt: skip
        server.env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = PACKAGE
        server.env["PYTHONPATH"] += f":{TEST_FOLDER}"
        if overlapped:
            with_habits(server, "overlap")
        return server


def environment() -> dict[str, str | None]:
    return {
        # OpenMP threads that spin while they wait make servers slow that share the cores.
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
        # Full soon, so that they are not taken for a leak (layers/packed_linear.py).
        "LRU_CACHE_CAPACITY": "64",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }


def answer_all(server: Server, requests: Sequence[Request], *, refused: bool = False) -> None:
    """Fill in what `server` answers as `expected`; `refused`: HTTP 400 is an answer too."""
    with ThreadPoolExecutor(16) as pool:
        outcomes = pool.map(lambda r: ask(server.port, "/generate", r.payload), requests)
        for request, outcome in zip(requests, outcomes):
            if outcome.status != 200 and not (refused and outcome.status == 400):
                raise RuntimeError(f"{request}: {outcome}")
            request.expected = outcome.answer


_SAMPLE = re.compile(r"^sglang:(\w+)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)


def metrics(server: Server) -> dict[str, float]:
    """`/metrics` by name without `sglang:`, samples of one name added up."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def flush_cache(server: Server) -> bool:
    """Empty the radix cache; False while requests run."""
    request = urllib.request.Request(f"{server.url}/flush_cache?timeout=30", data=b"")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status == 200
    except OSError:
        return False


def what_is_left(server: Server, patience: float = 30.0) -> list[str]:
    """What an idle server still holds, nothing if all is well.

    Running and queued requests, slots in use, and slots that are not free once the cache is empty.
    Rows of `req_to_token` and duplicate pages are checked by the idle scheduler itself, which
    logs a leak and ends the server.
    """
    deadline = time.monotonic() + patience
    while True:
        left = _held(server)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    log = server.log()
    left += [sign for sign in ("leak detected", "double free", "use-after-free") if sign in log]
    return left


def _held(server: Server) -> list[str]:
    left = _load(server)
    if not left and not flush_cache(server):
        left = ["the cache cannot be flushed"]
    # Nothing is cached any more: what is not free now is lost.
    return left or _load(server)


def _load(server: Server) -> list[str]:
    (load,) = server.request("/v1/loads")["loads"]
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return [f"{name} {load[name]}" for name in names if load[name]]


def resident_bytes(server: Server) -> int:
    """Resident memory of all processes of the server."""
    return sum(process.memory_info().rss for process in server.processes())


def tracebacks(server: Server) -> int:
    return server.log().count("Traceback (most recent call last)")
