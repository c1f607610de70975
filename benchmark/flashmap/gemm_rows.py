"""Matrix products of the target by the number of verified rows: where a few rows more cost a lot.

    python benchmark/flashmap/gemm_rows.py --requests 16 64 --json out/gemm_rows.json

A step verifies W rows a request, and the library computes a product in tiles of rows: the row that
begins another tile can cost as much as a hundred more would. Layers of Qwen3-8B in bfloat16, the
time of all a step's products with W from 14 to 18, by the library's own choice and, where cuBLASLt
can be loaded, by the best of the kernels that it proposes (``--proposals``). Medians of CUDA graph
replays between two events; successive calls read different weights, more of them than fit in the L2
cache. Needs one NVIDIA GPU; torch alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from graph_timing import replay_times
from shapes import TARGET

_HIDDEN, _INNER, _LAYERS = (
    TARGET[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
)
_QUERIES, _KEYS = (
    TARGET[name] * TARGET["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
)
# (output features, input features) -> how many of them a step has.
PRODUCTS = {
    (_QUERIES + 2 * _KEYS, _HIDDEN): _LAYERS,
    (_HIDDEN, _QUERIES): _LAYERS,
    (2 * _INNER, _HIDDEN): _LAYERS,
    (_HIDDEN, _INNER): _LAYERS,
    (TARGET["vocab_size"], _HIDDEN): 1,
}
# Bytes of weights that calls rotate through: several times an L2 cache.
ROTATED_BYTES = 256 << 20
WORKSPACE_BYTES = 32 << 20


def microseconds(call: Callable[[int], None], copies: int) -> float:
    return statistics.median(replay_times(call, copies, repeats=7))


class CublasLt:
    """``y = x Wᵀ`` by each kernel that cuBLASLt proposes; what is used of its C interface."""

    # cublasLt.h, library_types.h: compute in float32, of bfloat16.
    COMPUTE_32F, R_32F, R_16BF = 68, 0, 14
    TRANSA, MAX_WORKSPACE = 3, 1

    class Proposal(ctypes.Structure):
        _fields_ = [
            ("algo", ctypes.c_uint64 * 8),
            ("workspace", ctypes.c_size_t),
            ("state", ctypes.c_int),
            ("waves", ctypes.c_float),
            ("reserved", ctypes.c_int * 4),
        ]

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(_loaded_library("libcublasLt.so"))
        self.handle = self._created("cublasLtCreate")
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def _created(self, name: str, *args) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._checked(name, ctypes.byref(made), *args)
        return made

    def _checked(self, name: str, *args) -> None:
        status = getattr(self.lib, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned {status}")

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        """Of a column-major matrix without gaps."""
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        return self._created("cublasLtMatrixLayoutCreate", self.R_16BF, *sizes)

    def proposals(
        self, rows: int, n: int, k: int, most: int
    ) -> list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]]:
        """Calls that take ``x (rows, k)``, ``W (n, k)`` and ``y (rows, n)``."""
        product = self._created("cublasLtMatmulDescCreate", self.COMPUTE_32F, self.R_32F)
        one = ctypes.c_int32(1)
        self._checked("cublasLtMatmulDescSetAttribute", product, self.TRANSA, ctypes.byref(one), 4)
        # In columns: yᵀ (n, rows) = W (k, n)ᵀ · xᵀ (k, rows).
        w, x, y = self._layout(k, n), self._layout(k, rows), self._layout(n, rows)
        preference = self._created("cublasLtMatmulPreferenceCreate")
        size = ctypes.c_uint64(WORKSPACE_BYTES)
        args = (self.MAX_WORKSPACE, ctypes.byref(size), 8)
        self._checked("cublasLtMatmulPreferenceSetAttribute", preference, *args)
        found, count = (self.Proposal * most)(), ctypes.c_int()
        self._checked(
            *("cublasLtMatmulAlgoGetHeuristic", self.handle, product, w, x, y, y, preference),
            *(most, found, ctypes.byref(count)),
        )
        alpha, beta = ctypes.c_float(1), ctypes.c_float(0)

        def bound(proposal):
            def call(x_rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
                pointers = [ctypes.c_void_p(t.data_ptr()) for t in (weight, x_rows, out)]
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                self._checked(
                    *("cublasLtMatmul", self.handle, product, ctypes.byref(alpha)),
                    *(pointers[0], w, pointers[1], x, ctypes.byref(beta)),
                    *(pointers[2], y, pointers[2], y, ctypes.byref(proposal.algo)),
                    *(ctypes.c_void_p(self.workspace.data_ptr()), size, stream),
                )

            return call

        return [bound(p) for p in found[: count.value] if p.state == 0]


def _loaded_library(name: str) -> str:
    """The file of a library that torch has loaded already."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            return line.split()[-1]
    raise RuntimeError(f"{name} is not loaded")


def measure(rows: int, shape: tuple[int, int], lt: CublasLt | None, most: int) -> dict:
    n, k = shape
    copies = max(2, ROTATED_BYTES // (2 * n * k))
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(copies, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    library = microseconds(lambda i: torch.mm(x, weights[i].T, out=out), copies)
    row = dict(rows=rows, product=shape, library_us=library)
    if lt is not None:
        expected = x @ weights[0].T
        times = []
        for proposal in lt.proposals(rows, n, k, most):
            proposal(x, weights[0], out)
            torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
            times.append(microseconds(lambda i, p=proposal: p(x, weights[i], out), copies))
        row |= dict(best_us=min(times), best=times.index(min(times)), proposals=len(times))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--widths", type=int, nargs="+", default=[14, 15, 16, 17, 18])
    parser.add_argument("--proposals", type=int, default=0, help="of cuBLASLt, at most, a product")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    lt = CublasLt() if options.proposals else None
    saved = []
    head = "| requests | W | rows | ms a step | TFLOP/s | ms, best proposals | of these, µs: "
    print(head + " | ".join(f"{n} x {k}" for n, k in PRODUCTS) + " |")
    print("|" + "---|" * (6 + len(PRODUCTS)))
    for requests in options.requests:
        for width in options.widths:
            rows = requests * width
            found = [measure(rows, s, lt, options.proposals) for s in PRODUCTS]
            counts = PRODUCTS.values()
            step = sum(f["library_us"] * c for f, c in zip(found, counts)) / 1e3
            flops = sum(2 * rows * n * k * c for (n, k), c in PRODUCTS.items())
            best = ""
            if lt is not None:
                best = f"{sum(f['best_us'] * c for f, c in zip(found, counts)) / 1e3:.2f}"
            cells = " | ".join(
                f"{f['library_us']:.0f}" + (f" ({f['best_us']:.0f}, {f['best']})" if lt else "")
                for f in found
            )
            print(
                f"| {requests} | {width} | {rows} | {step:.2f} | {flops / step / 1e9:.0f} | {best} "
                f"| {cells} |",
                flush=True,
            )
            saved += [dict(f, requests=requests, width=width) for f in found]
    if options.json:
        Path(options.json).write_text(json.dumps(saved, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
