"""How busy the GPU is in steady decode steps: the gaps between kernels, and what takes longest.

    python benchmark/flashmap/timeline.py --json out/timeline.json
    python benchmark/flashmap/timeline.py --trace FILE.trace.json.gz     an old trace, no GPU

An engine of Qwen3-8B shapes with random weights decodes under the torch profiler (GPU activity
only, so that the profiler does not slow the host). A step is what lies between the starts of two
drafts; ten in the middle of the run are looked at. The GPU is busy while any kernel or copy runs,
so that kernels that overlap count once. Dependent launches make a kernel's time include its wait
for the one before, which hides small gaps inside a CUDA graph; those between graphs, where the host
could be late, show.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from turn import alone  # noqa: E402

ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")
FIRST_OF_A_STEP = "_draft_rows_kernel"


@dataclass(frozen=True)
class Timeline:
    """Of ``steps`` decode steps; microseconds."""

    steps: int
    step_us: float
    busy_us: float
    launches: float
    longest_gaps_us: list[float]
    kernels: list[tuple[str, float, float]]
    """Name, time a step and launches a step, the longest first."""

    @property
    def gap_share(self) -> float:
        return 1 - self.busy_us / self.step_us

    @classmethod
    def of(cls, events: list[dict], steps: int) -> "Timeline":
        """Of a trace's ``traceEvents``; the ``steps`` in the middle."""
        work = sorted(
            (e for e in events if e.get("cat") in ACTIVITIES and "dur" in e),
            key=lambda e: e["ts"],
        )
        starts = [e["ts"] for e in work if FIRST_OF_A_STEP in e["name"]]
        if len(starts) <= steps:
            raise SystemExit(f"error: the trace has {len(starts)} drafts, {steps + 1} are needed")
        first = (len(starts) - 1 - steps) // 2
        begin, end = starts[first], starts[first + steps]
        inside = [e for e in work if begin <= e["ts"] < end]
        busy, reached, gaps = 0.0, begin, []
        for event in inside:
            start, stop = event["ts"], min(event["ts"] + event["dur"], end)
            if start > reached:
                gaps.append(start - reached)
            busy += max(0.0, stop - max(start, reached))
            reached = max(reached, stop)
        gaps.append(end - reached)
        times, launches = Counter(), Counter()
        for event in inside:
            name = short(event["name"])
            times[name] += event["dur"]
            launches[name] += 1
        return cls(
            steps=steps,
            step_us=(end - begin) / steps,
            busy_us=busy / steps,
            launches=len(inside) / steps,
            longest_gaps_us=sorted(gaps, reverse=True)[:5],
            kernels=[(n, t / steps, launches[n] / steps) for n, t in times.most_common()],
        )


def short(name: str) -> str:
    """A kernel's name without its types and arguments."""
    name = re.sub(r"^void ", "", name).split("(")[0]
    return re.split(r"<", name)[0][-60:] or name[:60]


def record(options: argparse.Namespace) -> Path:
    """Decode with a profiler running; the trace."""
    import sglang
    from step_time import engine_arguments

    out = Path(options.out)
    options.batch_sizes, options.attention_backend = [options.requests], ""
    engine = sglang.Engine(**engine_arguments(options, out / "models"))
    sampling = dict(temperature=options.temperature, ignore_eos=True)

    def decode(tokens: int, first: int) -> None:
        prompts = [[first + i] * options.context for i in range(options.requests)]
        engine.generate(input_ids=prompts, sampling_params=sampling | {"max_new_tokens": tokens})

    old = set(out.glob("**/*.trace.json.gz"))
    with alone():
        decode(options.tokens, 1000)
        engine.start_profile(
            output_dir=str(out), activities=["GPU"], with_stack=False, record_shapes=False
        )
        decode(3 * options.steps + 10, 2000)
        engine.stop_profile()
    engine.shutdown()
    return next(iter(set(out.glob("**/*.trace.json.gz")) - old))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("flashmap", "tree"), default="flashmap")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of the warm-up")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verify-width", type=int, help="W, default K + 1")
    parser.add_argument("--top", type=int, default=15, help="kernels to list")
    parser.add_argument("--out", default="out/timeline", help="folder of traces")
    parser.add_argument("--trace", type=Path, help="look at this trace instead")
    parser.add_argument("--json", type=Path, help="where to save the numbers")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    trace = options.trace or record(options)
    opener = gzip.open if trace.suffix == ".gz" else open
    with opener(trace, "rt") as file:
        timeline = Timeline.of(json.load(file)["traceEvents"], options.steps)
    gaps = ", ".join(f"{gap:.1f}" for gap in timeline.longest_gaps_us)
    print(
        f"{trace}: {timeline.steps} steps of {timeline.step_us:.0f} us, GPU busy "
        f"{100 - 100 * timeline.gap_share:.2f} %, gaps {100 * timeline.gap_share:.2f} %, "
        f"{timeline.launches:.0f} launches a step; longest gaps {gaps} us"
    )
    print("| kernel | us a step | launches a step |\n|---|---|---|")
    for name, time, launches in timeline.kernels[: options.top]:
        print(f"| {name} | {time:.1f} | {launches:.1f} |")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        summary = asdict(timeline) | {"gap_share": timeline.gap_share, "requests": options.requests}
        options.json.write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
