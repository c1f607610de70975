"""Finds the tiles of a draft's products and of its attention where they run: inside the draft.

    python benchmark/flashmap/draft_tiles.py --seconds 60

A product alone in a loop is not what it is between others: whether its programs fit on an SM beside
those of the kernel in front decides how early its weights are asked for. So each choice is tried
alone in the captured draft of one request, and the best of every product together at the end.
Compiling takes longest, and is done by several processes first. Needs one NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from typing import Any

import torch
from draft_step import build, copy_bandwidth, median_ms, weight_bytes
from sglang.kernels.ops.speculative.flashmap import cross_attention, skinny_linear
from sglang.kernels.ops.speculative.flashmap.skinny_linear import Extras, Tiles
from sglang.srt.speculative.flashmap.drafter import Drafter, DraftInputs
from turn import alone

# (output features, input features), and whether a residual is added (and moments are left).
Product = tuple[int, int, bool]
PRODUCTS: dict[str, Product] = {
    "o": (2048, 2048, True),
    "fc2": (2048, 8192, True),
    "fc1": (8192, 2048, False),
    "cross q": (2048, 2048, False),
    "qkv": (6144, 2048, False),
    "head": (32768, 2048, False),
    "x_embed": (2048, 4096, True),
    "context kv, others": (20480, 2048, False),
    "context kv, first layer": (4096, 2048, False),
    "anchor": (2048, 4096, False),
}
ATTENTION = "attention"


def product_tiles(product: Product) -> list[Tiles]:
    """Those worth a try; what does not fit is refused when it is launched."""
    out_features, in_features, moments = product
    found = []
    if in_features == 2048 and out_features <= 4096:
        found += [Tiles(16, 2048, 1, w, w, 1, whole=1) for w in (4, 8)]
    if out_features <= 4096:
        deep = ((256, 6), (256, 8), (512, 3), (512, 4), (512, 5), (512, 6), (1024, 3))
        found += [Tiles(16, k, 1, 4, 4, stages) for k, stages in deep]
        found += [Tiles(16, 512, 2, 4, 4, 4), Tiles(16, 1024, 1, 8, 8, 3)]
    if not moments:
        wide = ((64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 128, 4, 8))
        wide += ((64, 256, 4, 3), (64, 256, 4, 4), (128, 64, 4, 6), (128, 128, 8, 4))
        wide += ((64, 128, 8, 6), (64, 256, 8, 4))  # more warps to convert weights of 8 bits
        found += [Tiles(n, k, 1, 1, warps, stages) for n, k, warps, stages in wide]
        found += [Tiles(32, k, 1, 4, 4, stages) for k, stages in ((256, 5), (512, 3), (512, 4))]
    return found


def attention_tiles() -> list[tuple[int, int, int]]:
    """``(context tile, warps, shortest split)``."""
    return [(n, w, c) for n, w, c in itertools.product((32, 64, 128), (4, 8), (64, 128)) if c >= n]


def choices(names: list[str]) -> list[tuple[str, Any]]:
    pairs = [(n, t) for n in names if n != ATTENTION for t in product_tiles(PRODUCTS[n])]
    return pairs + [(ATTENTION, t) for t in attention_tiles() if ATTENTION in names]


class Chosen:
    """Stands in for the launchers' own choice of tiles."""

    def __init__(self) -> None:
        self.products: dict[Product, Tiles] = {}
        self.attention: tuple[int, int, int] | None = None
        self._launch, self._tiles = skinny_linear.launch_skinny, cross_attention._tiles
        self._min_chunk = cross_attention._MIN_CHUNK
        for module in (skinny_linear, sys.modules[skinny_linear.__package__ + ".residual_linear"]):
            module.launch_skinny = self.launch_skinny
        cross_attention._tiles = self.attention_tiles

    def set(self, picked: dict[str, Any]) -> None:
        self.products = {PRODUCTS[n]: t for n, t in picked.items() if n != ATTENTION}
        self.attention = picked.get(ATTENTION)
        shortest = self.attention[2] if self.attention else self._min_chunk
        cross_attention._MIN_CHUNK = shortest

    def launch_skinny(self, *args, extras: Extras | None = None) -> None:
        product, given = args[:7], args[7:]  # the eighth would be the tiles
        extras = extras or Extras()
        known = (*product[1].shape, extras.moments_out is not None)
        tiles = self.products.get(known) or (given[0] if given else None)
        self._launch(*product, tiles=tiles, extras=extras)

    def attention_tiles(self, rows: int, dtype: torch.dtype):
        tiles = self._tiles(rows, dtype)
        if self.attention is None:
            return tiles
        return tiles._replace(block_n=self.attention[0], num_warps=self.attention[1])


def draft_us(drafter: Drafter, inputs: DraftInputs, repeats: int = 40) -> float:
    """Of a replay, captured anew."""
    drafter._graphs = {}
    drafter.capture([1], "cuda")
    drafter.draft(inputs.head(1))
    return median_ms(lambda: drafter.replay(1), repeats) * 1e3


def compile_part(options: argparse.Namespace, share: int) -> None:
    """Run a draft with every ``--processes``-th choice, for the compiler's cache."""
    drafter, _, inputs = build(options)
    inputs.seq_lens.fill_(options.contexts[0])
    chosen = Chosen()
    for name, tiles in choices(options.only)[share :: options.processes]:
        chosen.set({name: tiles})
        try:
            drafter._draft(inputs.head(1))
        except Exception as refused:  # too much shared memory: not a choice
            print(f"{name} {tuple(tiles)}: {repr(refused)[:90]}")
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="for measuring")
    parser.add_argument("--only", nargs="+", default=[*PRODUCTS, ATTENTION])
    parser.add_argument("--contexts", type=int, nargs=1, default=[256])
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # As `build` wants them: a greedy chain draft, its context attended by our kernel.
    vars(options).update(batch_sizes=[1], draft_vocab_size=32768, temperature=0.0)
    vars(options).update(attention="triton", noise="auto", noise_error=0.0)
    vars(options).update(tree_candidates=0, tree_budget=32)
    if options.share is not None:
        compile_part(options, options.share)
        return
    command = [sys.executable, *sys.argv, "--share"]
    started = [subprocess.Popen([*command, str(i)]) for i in range(options.processes)]
    assert not any([process.wait() for process in started])

    with alone():
        measure(options)


def measure(options: argparse.Namespace) -> None:
    drafter, model, inputs = build(options)
    inputs.seq_lens.fill_(options.contexts[0])
    floor = weight_bytes(model) / copy_bandwidth() * 1e6
    base = draft_us(drafter, inputs)
    print(f"{base:.1f} us with the tiles of the launchers; reading the weights takes {floor:.1f}")
    chosen, picked, end = Chosen(), {}, time.monotonic() + options.seconds
    best = base
    for name, tiles in choices(options.only):
        if time.monotonic() > end:
            break
        chosen.set(picked | {name: tiles})
        try:
            us = draft_us(drafter, inputs)
        except Exception:
            torch.cuda.synchronize()
            continue
        print(f"{name} {tuple(tiles)}: {us:.1f}", flush=True)
        if us < best:
            best, picked = us, picked | {name: tiles}
    chosen.set(picked)
    print(f"together: {draft_us(drafter, inputs):.1f} us")
    for name, tiles in picked.items():
        print(f"  {name}: {tuple(tiles)}")


if __name__ == "__main__":
    main()
