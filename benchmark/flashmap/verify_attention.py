"""Verify attention on one GPU: split-KV beside FlashAttention 3, flashinfer and upstream's Triton.

    python benchmark/flashmap/verify_attention.py --json out/verify.json --plot out/verify.png
    python benchmark/flashmap/verify_attention.py --only splitkv    without sglang
    python benchmark/flashmap/verify_attention.py --check           against the float64 reference
    python benchmark/flashmap/verify_attention.py --tune --json out/tune.json
    python benchmark/flashmap/verify_attention.py --crossover out/verify.json   no GPU needed, nor
        for --plot beside it

Heads of Qwen3-8B (32 queries, 8 keys, 128 wide), bfloat16, slots scattered over the pool one by
one (``--ordered``: one after the other). A time is that of CUDA graph replays between two events;
successive calls read different layers' pools, more of them than fit in the L2 cache, as a model's
layers do. The floor reads the prefix's keys and values once, at the copy bandwidth measured in the
same run; ``loads`` is a kernel that reads them by slot and does nothing else; ``pack`` makes the
bits of a step's mask, once for all layers. A tree costs
FlashAttention 3 a pass over the prefix and upstream's fused one over the drafts.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType

import torch
import triton
import triton.language as tl
from graph_timing import replay_times

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS, BATCHES = (17, 65), (1, 4, 16, 64)
CONTEXTS = (256, 2048, 8192, 32768, 131072)
KERNELS = "sglang.kernels.ops"
# Bytes of pools that calls rotate through: several times an L2 cache.
ROTATED_BYTES = 256 << 20
COLUMNS = ("splitkv", "fa3", "flashinfer", "triton")


def load(name: str) -> ModuleType:
    """A module of the kernels; without sglang its file alone, which others then find by its
    name."""
    name = f"{KERNELS}.{name}"
    try:
        return importlib.import_module(name)
    except ImportError:
        path = Path(__file__).parents[2] / "python" / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


load("speculative.flashmap.widen")  # which the next imports
kernel, mask_bits = load("attention.verify_splitkv_gqa"), load("attention.verify_mask_bits")


def random_trees(batch: int, length: int) -> torch.Tensor:
    """``(B, L, L)`` bool: what each node of a random tree sees."""
    mask = torch.zeros(batch, length, length, dtype=torch.bool, device="cuda")
    requests = torch.arange(batch, device="cuda")
    for node in range(length):
        if node:
            mask[:, node] = mask[requests, torch.randint(node, (batch,), device="cuda")]
        mask[:, node, node] = True
    return mask


@dataclass
class Problem:
    """One verify step: random queries, keys and values of ``batch`` requests in scattered slots."""

    batch: int
    context: int
    length: int
    tree: bool
    dtype: torch.dtype = torch.bfloat16
    pool_dtype: torch.dtype | None = None
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    v_head_dim: int = HEAD_DIM
    prefixes: list[int] | None = None
    layers: int | None = None
    ordered: bool = False
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.prefixes = self.prefixes or [self.context] * self.batch
        tokens = self.batch * self.length
        total = sum(self.prefixes)
        size = self.kv_heads * (self.head_dim + self.v_head_dim)
        self.kv_bytes = total * size * (self.pool_dtype or self.dtype).itemsize
        if self.layers is None:
            self.layers = min(128, ROTATED_BYTES // self.kv_bytes + 1)
        new = dict(dtype=self.dtype, device="cuda")
        self.q = torch.randn(tokens, self.heads, self.head_dim, **new)
        self.out = torch.empty(tokens, self.heads, self.v_head_dim, **new)
        order = torch.arange if self.ordered else torch.randperm
        slots = order(total + tokens, device="cuda")
        self.kv_indices, self.new_slots = slots[:total], slots[total:]
        self.pools = []
        for _ in range(self.layers):
            keys = torch.randn(total + tokens, self.kv_heads, self.head_dim, **new)
            values = torch.randn(total + tokens, self.kv_heads, self.v_head_dim, **new)
            k, v = keys[self.new_slots], values[self.new_slots]
            if self.pool_dtype is not None:
                keys, values = keys.to(self.pool_dtype), values.to(self.pool_dtype)
            self.pools.append((k, v, keys, values))
        self.kv_indptr = torch.tensor([0, *self.prefixes], device="cuda").cumsum(0).int()
        self.qo_indptr = torch.arange(self.batch + 1, device="cuda").int() * self.length
        self.mask = self.words = None
        if self.tree:
            self.mask = random_trees(self.batch, self.length)
            words = self.batch, self.length, mask_bits.words_a_row(self.length)
            self.words = torch.empty(words, dtype=torch.int64, device="cuda")
            mask_bits.pack_verify_mask_triton(self.mask, self.words)
        self.scale = self.head_dim**-0.5

    def layer(self) -> tuple[torch.Tensor, ...]:
        """``k, v, key pool, value pool`` of the layer whose turn it is."""
        self.calls += 1
        return self.pools[self.calls % self.layers]

    def full_mask(self) -> torch.Tensor:
        """The mask with the prefix's columns, all of them seen."""
        rows = torch.ones(
            self.batch, self.length, self.context + self.length, dtype=torch.bool, device="cuda"
        )
        rows[:, :, self.context :] = self.mask
        return rows

    @cached_property
    def table(self) -> torch.Tensor:
        """``(B, context + L)`` int32 slots, as ``req_to_token``."""
        prefix = self.kv_indices.view(self.batch, self.context)
        return torch.cat((prefix, self.new_slots.view(self.batch, -1)), 1).int()

    def splitkv(self, tiles=None, programs: int | None = None, **features) -> None:
        k, v, keys, values = self.layer()
        kernel.verify_attention_triton(
            self.q,
            k,
            v,
            self.out,
            keys,
            values,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.words,
            self.length,
            self.scale,
            tiles=tiles,
            programs=programs,
            **features,
        )

    def reference(self, **features) -> torch.Tensor:
        """Of the layer whose turn it is, in float64."""
        k, v, keys, values = (x.double() for x in self.layer())
        out = torch.empty(self.out.shape, dtype=torch.float64, device="cuda")
        kernel.verify_attention_torch(
            self.q.double(),
            k,
            v,
            out,
            keys,
            values,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.words,
            self.length,
            self.scale,
            **features,
        )
        return out


@triton.jit
def _load_kernel(
    keys, values, slots, sums, prefix, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    # Programs: (key head, part of the prefix); heads side by side, as their rows are.
    head, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    total = tl.zeros((BLOCK, D), tl.float32)
    for first in tl.range(part * BLOCK, prefix, parts * BLOCK):
        slot = tl.load(slots + first + n, mask=first + n < prefix, other=0)
        row = slot[:, None] * STRIDE + head * D + d[None, :]
        total += tl.load(keys + row).to(tl.float32) + tl.load(values + row).to(tl.float32)
    tl.store(sums + head * parts + part, tl.sum(total))


def loads_call(problem: Problem) -> Callable[[], object]:
    """Reads what a verify step reads of the pool."""
    parts = 8 * torch.cuda.get_device_properties("cuda").multi_processor_count // problem.kv_heads
    sums = torch.empty(problem.kv_heads * parts, device="cuda")
    total = sum(problem.prefixes)

    def call() -> None:
        _, _, keys, values = problem.layer()
        grid = (problem.kv_heads, min(parts, triton.cdiv(total, 32)))
        slots, stride = problem.kv_indices, keys.stride(0)
        _load_kernel[grid](keys, values, slots, sums, total, stride, problem.head_dim, 32)

    return call


def splitkv_call(problem: Problem) -> Callable[[], object]:
    return problem.splitkv


def pack_call(problem: Problem) -> Callable[[], object]:
    """The mask as bits, which a verify step does once for all layers."""
    return lambda: mask_bits.pack_verify_mask_triton(problem.mask, problem.words)


def triton_call(problem: Problem) -> Callable[[], object]:
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    mask = mask_indptr = None
    if problem.tree:
        mask = problem.full_mask().view(torch.uint8).flatten()
        rows = problem.length * (problem.context + problem.length)
        mask_indptr = torch.arange(problem.batch + 1, device="cuda") * rows

    def call() -> None:
        k, v, keys, values = problem.layer()
        extend_attention_fwd(
            problem.q,
            k,
            v,
            problem.out,
            keys,
            values,
            problem.qo_indptr,
            problem.kv_indptr,
            problem.kv_indices,
            mask,
            True,
            mask_indptr,
            problem.length,
            1.0,
            1.0,
            problem.scale,
        )

    return call


def fa3_call(problem: Problem) -> Callable[[], object]:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache
    from sglang.kernels.ops.attention.suffix_attention_merge import (
        merge_suffix_attention_in_place,
    )

    def attend(causal: bool, lens: torch.Tensor, **options):
        _, _, keys, values = problem.layer()
        result = flash_attn_with_kvcache(
            q=problem.q,
            k_cache=keys[:, None],
            v_cache=values[:, None],
            page_table=table,
            cache_seqlens=lens,
            cu_seqlens_q=problem.qo_indptr,
            max_seqlen_q=problem.length,
            softmax_scale=problem.scale,
            causal=causal,
            **options,
        )
        return result, keys, values

    if not problem.tree:
        table = problem.table
        lens = torch.full_like(problem.qo_indptr[1:], problem.context + problem.length)
        return lambda: attend(True, lens)

    table = problem.table[:, : problem.context].contiguous()
    lens = torch.full_like(problem.qo_indptr[1:], problem.context)
    # Each node's row lists the slots it sees first.
    order = (~problem.mask).to(torch.uint8).sort(dim=2, stable=True).indices
    suffix = problem.table[:, problem.context :, None].expand(-1, -1, problem.length)
    suffix_table = suffix.transpose(1, 2).gather(2, order).flatten(0, 1).contiguous()
    suffix_lens = problem.mask.sum(2).flatten().int()

    def call() -> None:
        (prefix, lse, *_), keys, values = attend(False, lens, return_softmax_lse=True)
        merge_suffix_attention_in_place(
            q=problem.q,
            k_cache=keys,
            v_cache=values,
            suffix_page_table=suffix_table,
            suffix_cache_seqlens=suffix_lens,
            prefix=prefix,
            prefix_lse=lse,
            softmax_scale=problem.scale,
        )

    return call


def flashinfer_call(problem: Problem) -> Callable[[], object]:
    import flashinfer

    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    keys_per_request = problem.context + problem.length
    wrapper.plan(
        problem.qo_indptr,
        torch.arange(problem.batch + 1, device="cuda").int() * keys_per_request,
        problem.table.flatten(),
        torch.ones(problem.batch, dtype=torch.int32, device="cuda"),
        problem.heads,
        problem.kv_heads,
        problem.head_dim,
        1,
        custom_mask=problem.full_mask().flatten() if problem.tree else None,
        causal=not problem.tree,
        sm_scale=problem.scale,
        q_data_type=problem.dtype,
        kv_data_type=problem.dtype,
    )

    def call() -> None:
        _, _, keys, values = problem.layer()
        wrapper.run(problem.q, (keys[:, None], values[:, None]), out=problem.out)

    return call


CALLS = {
    "loads": loads_call,
    "pack": pack_call,
    "splitkv": splitkv_call,
    "fa3": fa3_call,
    "flashinfer": flashinfer_call,
    "triton": triton_call,
}


def microseconds(call: Callable[[], object], calls: int, repeats: int = 5) -> float:
    """Of one call; a graph of ``calls`` calls is replayed ``repeats`` times, the fastest counts."""
    return min(replay_times(lambda _: call(), calls, repeats))


def copy_bandwidth() -> float:
    """Bytes read and written per second by a kernel that copies 4 GiB.

    By a kernel, as ``copy_`` in a graph is the copy engines' work, which are slower.
    """
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    time_us = microseconds(lambda: torch.bitwise_not(source, out=target), 3)
    return 2 * source.nbytes / time_us * 1e6


def compare(args: argparse.Namespace) -> list[dict]:
    columns = args.only or COLUMNS
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    columns = ("loads", "pack", *columns)
    print(f"{'shape':6}{'L':>4}{'batch':>6}{'context':>8}{'floor':>9}", end="")
    print("".join(f"{name:>12}" for name in columns), "   us; share of copy bandwidth", sep="")
    rows = []
    for length in args.lengths:
        for batch in args.batches:
            for context in args.contexts:
                for tree in (False, True):
                    problem = Problem(batch, context, length, tree, ordered=args.ordered)
                    floor = problem.kv_bytes / bandwidth * 1e6
                    row = dict(
                        capability=list(torch.cuda.get_device_capability()),
                        length=length,
                        batch=batch,
                        context=context,
                        tree=tree,
                        ordered=args.ordered,
                        floor_us=floor,
                    )
                    calls = max(problem.layers, 8)
                    for name in columns:
                        if name == "pack" and not tree:
                            continue
                        try:
                            row[name] = microseconds(CALLS[name](problem), calls)
                        except Exception as error:  # a column that cannot run leaves the others
                            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
                    rows.append(row)
                    line = f"{'tree' if tree else 'chain':6}{length:4}{batch:6}{context:8}"
                    line += f"{floor:9.1f}"
                    for name in columns:
                        line += f"{row[name]:12.1f}" if name in row else f"{'-':>12}"
                    if "splitkv" in row:
                        line += f"{100 * floor / row['splitkv']:8.0f} %"
                    print(line, flush=True)
                    del problem
    for error in sorted({f"{k}: {v}" for row in rows for k, v in row.items() if "_error" in k}):
        print(error)
    return rows


def crossover(rows: list[dict]) -> dict[tuple[int, int], dict[tuple[bool, int], dict[int, int]]]:
    """`UP_TO` of srt/layers/attention/verify_crossover.py, for a GPU's full set of rows.

    For each context the largest batch up to which, at every context up to there, split-KV takes at
    most 10 % longer than the fastest other column, and less on geometric average; 0 if there is
    none.
    """
    table: dict[tuple[int, int], dict[tuple[bool, int], dict[int, int]]] = {}
    ratios: dict[tuple, dict[tuple[int, int], float]] = {}
    for row in rows:
        others = [row[name] for name in COLUMNS[1:] if name in row]
        missing = "splitkv" not in row or not others
        key = tuple(row["capability"]), row["tree"], row["length"] * HEADS // KV_HEADS
        ratio = float("inf") if missing else row["splitkv"] / min(others)
        ratios.setdefault(key, {})[row["context"], row["batch"]] = ratio
    for (capability, tree, query_rows), cells in ratios.items():
        upto = table.setdefault(capability, {}).setdefault((tree, query_rows), {})
        batches = sorted({batch for _, batch in cells})
        for context in sorted({context for context, _ in cells}):
            upto[context] = 0
            for most in batches:
                some = [r for (c, b), r in cells.items() if c <= context and b <= most]
                if max(some) <= 1.1 and math.prod(some) < 1:
                    upto[context] = most
    return table


def plot(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({row["length"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    figure, axes = pyplot.subplots(
        len(lengths), len(batches), figsize=(4 * len(batches), 3.5 * len(lengths)), squeeze=False
    )
    for i, length in enumerate(lengths):
        for j, batch in enumerate(batches):
            axis = axes[i][j]
            cells = [r for r in rows if r["length"] == length and r["batch"] == batch]
            for color, name in enumerate(COLUMNS):
                for tree, style in ((False, "-"), (True, "--")):
                    line = [
                        (r["context"], r[name]) for r in cells if r["tree"] == tree and name in r
                    ]
                    if line:
                        label = f"{name}, {'tree' if tree else 'chain'}"
                        axis.plot(*zip(*line), style, color=f"C{color}", marker=".", label=label)
            floor = [(r["context"], r["floor_us"]) for r in cells if not r["tree"]]
            axis.plot(*zip(*floor), ":", color="black", label="floor: prefix at copy bandwidth")
            axis.set(xscale="log", yscale="log", title=f"L {length}, batch {batch}")
            axis.set(xlabel="context", ylabel="µs")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def check() -> None:
    """Errors against float64, ragged and skewed batches, capture, repeatability."""
    started = time.monotonic()
    half = (torch.bfloat16, torch.float16)
    features = {
        "plain": {},
        "cap": dict(logit_cap=5.0),
        "window": dict(window=100),
        "sinks": dict(sinks=torch.randn(HEADS, device="cuda")),
    }
    cases = [
        (f"{dtype} {name}", dict(dtype=dtype), f) for dtype in half for name, f in features.items()
    ]
    cases += [
        ("float32", dict(dtype=torch.float32), {}),
        ("e4m3 pool", dict(pool_dtype=torch.float8_e4m3fn), dict(k_scale=0.5, v_scale=2.0)),
        ("G 1", dict(heads=8), {}),
        ("G 16, one key head", dict(heads=16, kv_heads=1), {}),
        ("G 7", dict(heads=28, kv_heads=4), {}),
        ("D 64", dict(head_dim=64, v_head_dim=64), {}),
        ("D 256", dict(head_dim=256, v_head_dim=256), {}),
        ("D 192, Dv 128", dict(head_dim=192), {}),
    ]
    ragged = [1, 0, 63, 64, 65, 5000, 17, 900]
    shapes = [(length, tree) for length in (17, 65) for tree in (False, True)]
    for name, options, extra in cases:
        worst = 0.0
        for length, tree in shapes if not options.get("head_dim") else shapes[1:2]:
            problem = Problem(len(ragged), 0, length, tree, prefixes=ragged, layers=1, **options)
            problem.out.fill_(float("nan"))
            problem.splitkv(**extra)
            expected = problem.reference(**extra)
            error = (problem.out.double() - expected).abs() / expected.abs().clamp_min(1)
            worst = max(worst, error.max().item())
        eps = torch.finfo(problem.dtype).eps
        verdict = "ok" if worst <= (32 if eps < 1e-6 else 4) * eps else "TOO LARGE"
        print(f"{name:28} max error {worst:.2e} = {worst / eps:.2f} eps  {verdict}", flush=True)

    problem = Problem(64, 0, 17, True, prefixes=[60000] + [5] * 63, layers=1)
    problem.splitkv()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.splitkv()
    # Other lengths in the captured graph: requests swap their prefixes.
    problem.kv_indptr.copy_(torch.tensor([0] + [5] * 63 + [60000]).cumsum(0))
    outputs = []
    for _ in range(3):
        problem.out.zero_()
        graph.replay()
        outputs.append(problem.out.clone())
    error = (outputs[0].double() - problem.reference()).abs().max().item()
    same = all(torch.equal(outputs[0], x) for x in outputs)
    print(f"captured, other lengths      max |error| {error:.2e}, replays equal: {same}")
    print(f"{time.monotonic() - started:.0f} s")


def candidates() -> Iterator:
    """``Tiles`` to try."""
    shapes = (
        *((64, 64, 4, s) for s in (2, 3, 4)),
        (64, 32, 4, 4),
        *((128, 64, 8, s) for s in (2, 3, 4)),
        (128, 32, 8, 4),
    )
    for block_m, block_n, num_warps, num_stages in shapes:
        yield kernel.Tiles(block_m, block_n, num_warps, num_stages, 1)


def compile_one(job: tuple) -> str | None:
    """Compiles in a process of its own, into Triton's cache; the error, if there is one."""
    length, tiles = job
    try:
        Problem(2, 256, length, True, layers=1).splitkv(tiles=kernel.Tiles(*tiles))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def tune(args: argparse.Namespace) -> list[dict]:
    jobs = [(length, tuple(tiles)) for length in args.lengths for tiles in candidates()]
    started = time.monotonic()
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        errors = list(pool.map(compile_one, jobs))
    print(f"compiled {len(jobs)} in {time.monotonic() - started:.0f} s", flush=True)
    shapes = ((1, 256), (1, 2048), (1, 32768), (4, 8192), (16, 2048), (64, 256), (64, 2048))
    bandwidth, rows = copy_bandwidth(), []
    for batch, context in shapes:
        for length in args.lengths:
            problem = Problem(batch, context, length, True)
            calls = max(problem.layers // 4, 8)
            best = None
            for (job_length, tiles), error in zip(jobs, errors, strict=True):
                if job_length != length:
                    continue
                tiles = kernel.Tiles(*tiles)
                name = "-".join(str(x) for x in tiles[:4])
                row = dict(length=length, batch=batch, context=context, tiles=list(tiles[:4]))
                rows.append(row)
                if error is not None:
                    row["error"] = error
                    continue
                row["us"] = {}
                for per_sm in (1, 2, 3):
                    for min_tiles in (1, 2, 4, 8):
                        options = tiles._replace(programs_per_sm=per_sm, min_tiles=min_tiles)
                        call = functools.partial(problem.splitkv, tiles=options)
                        time_us = microseconds(call, calls, 2)
                        row["us"][f"{per_sm}/{min_tiles}"] = time_us
                        if best is None or time_us < best[0]:
                            best = (time_us, name, per_sm, min_tiles)
            floor = problem.kv_bytes / bandwidth * 1e6
            print(
                f"L {length} batch {batch} context {context}: floor {floor:.1f} us, best", end=" "
            )
            print("%.1f us %s, %d programs an SM, min %d tiles" % best, flush=True)
            if batch == 1 and context == 256:
                for error in filter(None, errors):
                    print("  not compiled:", error)
    print(f"{time.monotonic() - started:.0f} s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=COLUMNS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="drafts a request")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--ordered", action="store_true", help="slots one after the other")
    parser.add_argument("--check", action="store_true", help="compare with float64, no timing")
    parser.add_argument("--tune", action="store_true", help="sweep tile sizes (lengths 17 and 65)")
    parser.add_argument("--crossover", metavar="JSON", help="print the table of a comparison")
    parser.add_argument("--jobs", type=int, default=12, help="compilers of --tune side by side")
    parser.add_argument("--json", help="where to save the rows")
    parser.add_argument("--plot", help="where to draw time over context")
    args = parser.parse_args()
    if args.crossover:
        rows = json.loads(Path(args.crossover).read_text())
        print(crossover(rows))
        if args.plot:
            plot(rows, args.plot)
        return
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU and none is visible")
    with torch.inference_mode():
        if args.check:
            check()
            return
        rows = tune(args) if args.tune else compare(args)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    if args.plot and not args.tune:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
