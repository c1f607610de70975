"""Milliseconds per decode step at Qwen3-8B shapes: plain decoding, FLASHMAP, upstream's DFLASH.

    python benchmark/flashmap/step_time.py compare --out out/steps plain flashmap:4 flashmap
    python benchmark/flashmap/step_time.py table --out out/steps

``compare`` starts one engine per mode on one GPU, all at once (starting takes longest), then lets
them measure one after another while the others idle; ``run`` measures a single mode. A mode is
``plain``, ``flashmap``, ``tree`` (8 candidates, W 17), ``grown`` (1 candidate, 8 choices a slot,
W 17) or ``dflash``, with ``#W`` for another verify width, ``/BACKEND`` for an attention backend,
``:N`` for a simulated accept length of N (upstream's SGLANG_SIMULATE_ACC_LEN) and ``@T`` for a
sampling temperature, in this order. Weights are random, so without a simulated length nearly
nothing is accepted. ``table`` prints the results in ``--out``.

Milliseconds per step are (time of a run − time of a one-token run of other prompts of the same
lengths) / verify steps, the median of several repeats; tokens per second belong to the accept
length of the run. Compare numbers of one machine and one session only.

``table --plot FILE`` draws step time over the number of requests, with the floors of plain decoding
and of FLASHMAP: the larger of what reading the weights and the context once takes at
``--bandwidth`` (of a copy, as ``draft_step.py`` measures it) and what the matrix products take at
``--flops``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import shapes  # noqa: E402
from turn import alone, await_turn, give_turns, start  # noqa: E402

TREES = {
    "tree": dict(speculative_flashmap_tree_candidates=8, speculative_num_draft_tokens=17),
    "grown": dict(
        speculative_flashmap_tree_candidates=1,
        speculative_flashmap_tree_choices=8,
        speculative_num_draft_tokens=17,
    ),
}


def engine_arguments(options: argparse.Namespace, folder: Path) -> dict:
    arguments = dict(
        model_path=shapes.write(folder / "target", shapes.TARGET),
        load_format="dummy",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        disable_radix_cache=True,
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=sorted(set(options.batch_sizes)),
        max_running_requests=max(options.batch_sizes),
        context_length=max(options.context + options.tokens + 64, 4096),
        # Pools are bounded by tokens, so that several engines fit beside each other.
        mem_fraction_static=0.9,
        max_total_tokens=max(options.batch_sizes) * (options.context + options.tokens + 64),
        random_seed=0,
        sleep_on_idle=True,  # the others measure meanwhile
        log_level="warning" if not options.verbose else "info",
    )
    if options.attention_backend:
        arguments["attention_backend"] = options.attention_backend
    if options.mode in ("flashmap", *TREES):
        arguments |= dict(
            speculative_algorithm="FLASHMAP",
            speculative_draft_model_path=shapes.write(folder / "flashmap", shapes.FLASHMAP),
            speculative_draft_load_format="dummy",
        )
        arguments |= TREES.get(options.mode, {})
        if options.verify_width:
            arguments["speculative_num_draft_tokens"] = options.verify_width
    elif options.mode == "dflash":
        arguments |= dict(
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=shapes.write(folder / "dflash", shapes.DFLASH),
            speculative_draft_load_format="dummy",
        )
    return arguments


def measure(engine, batch_size: int, options: argparse.Namespace, seed: int) -> dict:
    import random

    rng = random.Random(seed)

    def timed(tokens: int) -> tuple[float, int, float]:
        prompts = [
            [rng.randrange(1000, 150000) for _ in range(options.context)] for _ in range(batch_size)
        ]
        params = dict(temperature=options.temperature, max_new_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - start
        infos = [output["meta_info"] for output in outputs]
        steps = max(info.get("spec_verify_ct") or tokens - 1 for info in infos)
        made = sum(info["completion_tokens"] for info in infos) - batch_size
        return seconds, steps, made

    timed(options.tokens)  # warm-up
    step_ms, rates, lengths = [], [], []
    for _ in range(options.repeats):
        prefill, _, _ = timed(1)
        seconds, steps, made = timed(options.tokens)
        step_ms.append((seconds - prefill) / steps * 1e3)
        rates.append(made / (seconds - prefill))
        lengths.append(made / batch_size / steps)
    return dict(
        step_ms=statistics.median(step_ms),
        step_ms_all=[round(x, 3) for x in step_ms],
        tokens_per_s=statistics.median(rates),
        accept_length=statistics.median(lengths),
    )


def run(options: argparse.Namespace) -> None:
    if options.accept_length:
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(options.accept_length)
        os.environ.setdefault("SGLANG_SIMULATE_ACC_METHOD", "match-expected")
    import sglang
    import torch

    out = Path(options.out)
    began = time.perf_counter()
    engine = sglang.Engine(**engine_arguments(options, out / "models"))
    result = dict(
        mode=options.mode,
        label=options.label or label_of(options),
        gpu=torch.cuda.get_device_name(0),
        sglang=sglang.__version__,
        context=options.context,
        start_s=round(time.perf_counter() - began, 1),
        batches={},
    )
    print(f"{result['label']}: started in {result['start_s']} s", flush=True)
    if options.turn:
        await_turn(Path(options.turn))
    for batch_size in options.batch_sizes:
        with alone():
            row = measure(engine, batch_size, options, seed=batch_size)
        result["batches"][str(batch_size)] = row
        print(
            f"{result['label']}: {batch_size} requests, {row['step_ms']:.2f} ms a step, "
            f"accept length {row['accept_length']:.2f}, {row['tokens_per_s']:.0f} tok/s",
            flush=True,
        )
    if options.profile:
        profile(engine, options)
    name = result["label"].replace(" ", "_").replace(",", "")
    (out / f"{name}_ctx{options.context}.json").write_text(json.dumps(result, indent=1))
    engine.shutdown()


def profile(engine, options: argparse.Namespace) -> None:
    """Write one torch profiler trace of a short run per batch size under ``--profile``."""
    for batch_size in options.batch_sizes:
        prompts = [[1000 + i] * options.context for i in range(batch_size)]
        params = dict(temperature=options.temperature, max_new_tokens=40, ignore_eos=True)
        engine.start_profile(
            output_dir=str(Path(options.profile) / f"{options.mode}_bs{batch_size}"),
            activities=["CPU", "GPU"],
            with_stack=False,
            record_shapes=False,
        )
        engine.generate(input_ids=prompts, sampling_params=params)
        engine.stop_profile()


def compare(options: argparse.Namespace) -> None:
    """Run every mode of ``options.modes`` in a process of its own and print the table."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    processes = []
    for i, mode in enumerate(options.modes):
        name, _, temperature = mode.partition("@")
        name, _, length = name.partition(":")
        name, _, backend = name.partition("/")
        name, _, width = name.partition("#")
        turn = out / f"turn{i}"
        command = [sys.executable, __file__, "run", "--mode", name, "--out", str(out)]
        command += ["--turn", str(turn), "--accept-length", length or "0"]
        command += ["--temperature", temperature or "0", "--attention-backend", backend]
        command += ["--verify-width", width] if width else []
        command += options.passed_on
        processes.append((turn, start(command, turn, out / f"log{i}.txt")))
    for process in give_turns(processes):
        print(f"failed: {' '.join(process.args)}; see {out}", file=sys.stderr)
    table(options)


def label_of(options: argparse.Namespace) -> str:
    label = " ".join(filter(None, (options.mode, options.attention_backend)))
    if options.accept_length:
        label += f" accept {options.accept_length:g}"
    if options.verify_width:
        label += f" W {options.verify_width}"
    if options.temperature:
        label += f" T {options.temperature:g}"
    return label


def table(options: argparse.Namespace) -> None:
    results = [json.loads(path.read_text()) for path in sorted(Path(options.out).glob("*.json"))]
    plain = {r["context"]: r["batches"] for r in results if r["mode"] == "plain"}
    sizes = sorted({int(b) for r in results for b in r["batches"]})
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    if options.plot:
        plot(results, options)
    print("| mode | context | " + " | ".join(f"{n} requests" for n in sizes) + " |")
    print("|---|---|" + "---|" * len(sizes))
    for r in sorted(results, key=lambda r: (r["context"], r["mode"] != "plain", r["label"])):
        cells = []
        for n in map(str, sizes):
            row = r["batches"].get(n)
            base = plain.get(r["context"], {}).get(n)
            if row is None:
                cells.append("")
                continue
            ratio = f" ({row['step_ms'] / base['step_ms']:.2f}×)" if base else ""
            cells.append(f"{row['step_ms']:.2f} ms{ratio}, {row['tokens_per_s']:.0f} tok/s")
        print(f"| {r['label']} | {r['context']} | " + " | ".join(cells) + " |")


def plot(results: list[dict], options: argparse.Namespace) -> None:
    """Step time over requests, both logarithmic, of the shortest context that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    context = min(r["context"] for r in results)
    chosen = [r for r in results if r["context"] == context]
    sizes = sorted({int(b) for r in chosen for b in r["batches"]})
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for r in sorted(chosen, key=lambda r: r["label"]):
        batches = sorted(map(int, r["batches"]))
        axes.plot(
            batches, [r["batches"][str(n)]["step_ms"] for n in batches], "o-", label=r["label"]
        )
    width = options.verify_width
    for name, rows, style in (("plain", 1, ":"), (f"FLASHMAP W {width}", width, "--")):
        floors = [
            shapes.floor_ms(n, context, rows=rows, bandwidth=options.bandwidth, flops=options.flops)
            for n in sizes
        ]
        axes.plot(sizes, floors, style, color="black", label=f"floor, {name}")
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="ms a step")
    axes.set_title(f"{chosen[0]['gpu']}, context {context}")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.plot, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run", help="measure one mode")
    one.add_argument("--mode", choices=("plain", "flashmap", *TREES, "dflash"), required=True)
    one.add_argument("--out", required=True)
    one.add_argument("--label")
    one.add_argument("--accept-length", type=float, default=0.0, help="simulate this accept length")
    one.add_argument("--verify-width", type=int, help="W, default K + 1")
    one.add_argument("--temperature", type=float, default=0.0)
    one.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64])
    one.add_argument("--context", type=int, default=256)
    one.add_argument("--tokens", type=int, default=160)
    one.add_argument("--repeats", type=int, default=3)
    one.add_argument("--turn", help="measure only when this file exists (set by compare)")
    one.add_argument("--attention-backend", help="empty: the server's choice")
    one.add_argument("--profile", help="write a trace of a short run per batch size here")
    one.add_argument("--verbose", action="store_true")
    merge = verbs.add_parser("table", help="print the measured modes side by side")
    several = verbs.add_parser("compare", help="measure several modes side by side")
    for verb in (merge, several):
        verb.add_argument("--out", required=True)
        verb.add_argument("--json", help="save all results in one file")
        verb.add_argument("--plot", help="draw step time over requests")
        verb.add_argument("--bandwidth", type=float, default=4.2e12, help="bytes a second")
        verb.add_argument("--flops", type=float, default=0.989e15, help="bfloat16, dense")
        verb.add_argument("--verify-width", type=int, default=17, help="W of the plot's floor")
    several.add_argument(
        "modes", nargs="+", help="plain, flashmap:4, flashmap@1, tree/triton:4, grown#33:4, dflash"
    )
    options, passed_on = parser.parse_known_args()
    if passed_on and options.verb != "compare":
        parser.error(f"unknown arguments {passed_on}")
    options.passed_on = passed_on
    {"run": run, "table": table, "compare": compare}[options.verb](options)


if __name__ == "__main__":
    main()
