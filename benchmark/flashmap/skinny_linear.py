"""Times ``skinny_linear`` at a draft's shapes beside the library, and finds its tiles.

    python benchmark/flashmap/skinny_linear.py            # a table
    python benchmark/flashmap/skinny_linear.py --tune     # and the best of many tiles

A time is that of one product inside a CUDA graph of many, whose weights together do not fit in the
L2 cache, as in a draft. GB/s counts the weights. Needs one NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from sglang.kernels.ops.speculative.flashmap import launch
from sglang.kernels.ops.speculative.flashmap.device import sm_count
from sglang.kernels.ops.speculative.flashmap.skinny_linear import (
    Tiles,
    default_tiles,
    skinny_linear,
    skinny_linear_triton,
)

# (out features, in features) of the draft of Qwen3-8B.
SHAPES = {
    "qkv": (6144, 2048),
    "q, o": (2048, 2048),
    "fc1": (8192, 2048),
    "fc2": (2048, 8192),
    "x_embed": (2048, 4096),
    "context kv": (24576, 2048),
    "head": (32768, 2048),
}
COLD_BYTES = 256 << 20


def candidates(rows: int) -> list[Tiles]:
    if rows <= 16:
        whole = [
            Tiles(n, k, s, w, num_warps=w, num_stages=stages)
            for n, k, s, w, stages in itertools.product(
                (16, 32), (512, 1024), (1, 2), (4, 8), (3, 4, 5)
            )
        ]
        wide = [
            Tiles(64, k, s, 1, num_warps=4, num_stages=stages)
            for k, s, stages in itertools.product((128, 256), (1, 2, 4), (3, 4, 6))
        ]
        return whole + wide
    return [
        Tiles(n, k, s, 1, num_warps=4, num_stages=stages)
        for n, k, s, stages in itertools.product((32, 64, 128), (64, 128), (1, 2, 4), (3, 4, 5))
    ]


def microseconds(call: Callable[[int], object], copies: int) -> float:
    """Time of one of ``call(0) … call(copies - 1)`` in a graph of them."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / (10 * copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--weights", choices=["bfloat16", "float8_e4m3fn"], default="bfloat16")
    parser.add_argument("--tune", action="store_true", help="try many tiles (minutes of compiling)")
    parser.add_argument("--json", help="where to save the rows")
    parser.add_argument("--no-dependent-launch", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the kernel needs an NVIDIA GPU and none is visible")
    if args.no_dependent_launch:
        launch.dependent_launch = lambda device: False
    print(f"{torch.cuda.get_device_name()}, {args.weights} weights")
    print("| rows | product | MB | library us | GB/s | ours us | GB/s | tiles | relative error |")
    print("|---|---|---|---|---|---|---|---|---|")
    saved: list[dict] = []
    with torch.inference_mode():
        for rows, name in itertools.product(args.rows, args.shapes):
            saved += measure(rows, name, getattr(torch, args.weights), args.tune)
    if args.json:
        Path(args.json).write_text(json.dumps(saved, indent=1))


def measure(rows: int, name: str, dtype: torch.dtype, tune: bool) -> list[dict]:
    n, k = SHAPES[name]
    megabytes = n * k * dtype.itemsize / 1e6
    copies = max(4, int(COLD_BYTES / 1e6 / megabytes))
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(copies, n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    weights = wide.to(dtype)
    scale = torch.ones(n, device="cuda") if dtype.itemsize == 1 else None
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)

    def ours(tiles: Tiles) -> float:
        def call(i: int) -> None:
            skinny_linear_triton(x, weights[i], None, scale, None, "none", out, list(tiles))

        return microseconds(call, copies)

    saved = []

    def row(time: float, tiles: Tiles, note: str = "") -> None:
        saved.append(dict(rows=rows, product=name + note, library_us=library, us=time, tiles=tiles))
        print(
            f"| {rows} | {name}{note} | {megabytes:.1f} | {library:.2f} | "
            f"{wide[0].numel() * 2 / library / 1e3:.0f} | {time:.2f} | "
            f"{megabytes / time * 1e3:.0f} | {tuple(tiles)} | {error:.1e} |",
            flush=True,
        )

    library = microseconds(lambda i: F.linear(x, wide[i]), copies)
    exact = x.double() @ weights[0].double().T
    error = float((skinny_linear(x, weights[0], scale=scale) - exact).norm() / exact.norm())
    default = default_tiles(rows, n, k, sm_count(x.device), weight_bytes=dtype.itemsize)
    row(ours(default), default)
    if not tune:
        return saved
    times = {}
    for tiles in candidates(rows):
        try:
            times[tiles] = ours(tiles)
        except Exception as refused:  # too much shared memory or scratch: not a choice
            torch.cuda.synchronize()
            if "AssertionError" not in repr(refused) and "OutOfResources" not in repr(refused):
                raise
    for best in sorted(times, key=times.get)[:3]:
        row(times[best], best, " tuned")
    return saved


if __name__ == "__main__":
    main()
