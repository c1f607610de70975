"""Milliseconds per decode step on a CPU: plain decoding beside FLASHMAP at several verify widths.

    python benchmark/flashmap/cpu_step.py --target DIR --draft DIR --widths 2 3 5 9 --json FILE

One request. The plain engine lives as long as the run; each width gets an engine of its own, and
the two answer in turn, so that what else the machine does falls on both. A step is (time of a long
answer - time of a one-token answer to a prompt of the same length) / steps, the median of
``--repeats``. A step costs the same whatever it accepts: with ``SGLANG_SIMULATE_ACC_LEN`` upstream
accepts ``--accept-length`` tokens a step, and the last columns read off what other lengths give,
``accept length · plain ms / FLASHMAP ms``.

On a machine that others use, take ``--threads 1 --clock cpu``: the processor time of the engine's
processes, in which waiting for a core does not count. With more threads a matrix product spins
until its slowest thread is done, and both clocks show the neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_process import Answer, EngineProcess  # noqa: E402

LENGTHS = (1.5, 2.0, 2.5, 3.0, 4.0)


class Mode:
    """An engine in a process of its own; ``width`` 0 is plain decoding."""

    def __init__(self, width: int, options: argparse.Namespace) -> None:
        self.width, self.options = width, options
        arguments = dict(
            model_path=str(options.target),
            dtype=options.dtype,
            skip_tokenizer_init=True,
            device="cpu",
            disable_radix_cache=True,
            max_running_requests=1,
            max_total_tokens=4096,
            mem_fraction_static=0.9,
            log_level="warning",
            sleep_on_idle=True,
        )
        environment = {"OMP_NUM_THREADS": str(options.threads)}
        if width:
            environment["SGLANG_SIMULATE_ACC_LEN"] = str(min(options.accept_length, width))
            environment["SGLANG_SIMULATE_ACC_METHOD"] = "match-expected"
            arguments |= dict(
                speculative_algorithm="FLASHMAP",
                speculative_draft_model_path=str(options.draft),
                speculative_num_draft_tokens=width,
            )
        self.step_ms: list[float] = []
        self._engine = EngineProcess(arguments, environment, by_cpu=options.clock == "cpu")
        self._answer(8)  # warm-up

    def _answer(self, tokens: int) -> Answer:
        prompt = [random.randrange(1000, 40000) for _ in range(self.options.context)]
        return self._engine.answer(prompt, temperature=0, max_new_tokens=tokens, ignore_eos=True)

    def measure(self) -> None:
        """Adds one measurement to ``step_ms``."""
        prefill = self._answer(1).seconds
        length = self.options.accept_length if self.width else 1
        answer = self._answer(1 + round(self.options.steps * length))
        self.step_ms.append((answer.seconds - prefill) / answer.steps * 1e3)

    def stop(self) -> None:
        self._engine.stop()


def compare(width: int, plain: Mode, options: argparse.Namespace) -> dict:
    """FLASHMAP at ``width`` against plain decoding, in turn."""
    mode = Mode(width, options)
    plain.step_ms = []
    try:
        for _ in range(options.repeats):
            plain.measure()
            mode.measure()
    finally:
        mode.stop()
    ratios = [ours / theirs for ours, theirs in zip(mode.step_ms, plain.step_ms)]
    return dict(
        width=width,
        plain_ms=statistics.median(plain.step_ms),
        step_ms=statistics.median(mode.step_ms),
        ratio=statistics.median(ratios),
        ratios=[round(ratio, 3) for ratio in ratios],
    )


def table(rows: list[dict]) -> str:
    """Markdown; the ratio is the accept length at which FLASHMAP breaks even."""
    heads = " | ".join(f"accept length {length:g}" for length in LENGTHS)
    lines = [
        f"| W | plain ms | FLASHMAP ms | ratio | {heads} |",
        "|---|---|---|---|" + "---|" * len(LENGTHS),
    ]
    for row in rows:
        gains = " | ".join(
            f"{length / row['ratio']:.2f}×" if length <= row["width"] else "" for length in LENGTHS
        )
        lines.append(
            f"| {row['width']} | {row['plain_ms']:.1f} | {row['step_ms']:.1f} | "
            f"{row['ratio']:.2f} | {gains} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8, 9])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=200, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of an answer")
    parser.add_argument("--accept-length", type=float, default=2.0, help="simulated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="JSON of the table's rows")
    options = parser.parse_args()
    plain = Mode(0, options)
    rows = []
    try:
        for width in options.widths:
            rows.append(compare(width, plain, options))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    finally:
        plain.stop()
    setting = f"{options.dtype}, {options.threads} threads, {options.clock} time"
    print(f"\n{setting}, {options.context} tokens of context")
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
