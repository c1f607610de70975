"""Accept length of a draft by domain: `eval_draft.py --target DIR --draft DIR --data DIR…`.

Answers the held-out prompts (scripts/train/heldout.jsonl: chat, code, math, copying, multilingual)
with FLASHMAP in our own engine, at T = 0 and T = 1, and reads from every answer how many drafts
each of its verify steps accepted. Prompts that share more than half of their 8-grams with the
training data are left out. Prints one table; writes evaluation.json, acceptance.png and the model
card anew into `--output` (the draft's folder).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from fork.errors import ForkError
from train.card import acceptance_table, write_card
from train.draft_config import FlashMapConfigError, read_config
from train.features import load_tokenizer
from train.overlap import seen_shares
from train.prompts import Prompt, read_prompts
from train.sampling import engine_available
from train.token_file import TokenFiles

PROMPTS = Path(__file__).parent / "train" / "heldout.jsonl"
_SEEN = 0.5


def held_out(options: argparse.Namespace, tokenizer: Any) -> list[Prompt]:
    """The prompts that are not in the training data.

    Raises ForkError when none is left.
    """
    prompts = read_prompts([options.prompts], tokenizer)
    if not options.data:
        print("no --data: the prompts were not checked against it", file=sys.stderr)
        return prompts
    lines = [json.loads(line) for line in options.prompts.read_text().splitlines() if line.strip()]
    words = [tokenizer.encode(line["prompt"], add_special_tokens=False) for line in lines]
    shares = seen_shares(words, TokenFiles(options.data))
    kept = [prompt for prompt, share in zip(prompts, shares) if share <= _SEEN]
    print(f"{len(prompts) - len(kept)} of {len(prompts)} prompts are in the data", file=sys.stderr)
    if not kept:
        raise ForkError(f"every prompt in {options.prompts} is in the data: give others.")
    return kept


def summarise(histogram: np.ndarray) -> dict[str, Any]:
    """Of `histogram (W,)`, verify steps by drafts accepted: mean tokens a step with the target's
    own, and the share of steps that accepted each slot."""
    steps = max(1, int(histogram.sum()))
    slots = histogram[::-1].cumsum()[::-1][1:] / steps
    return {
        "accept_length": 1.0 + float(slots.sum()),
        "slots": slots.tolist(),
        "histogram": histogram.tolist(),
    }


def evaluate(
    engine: Any, prompts: list[Prompt], width: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs all prompts at every temperature."""
    entries, overall = [], {}
    for heat in options.temperatures:
        outputs = engine.generate(
            input_ids=[prompt.ids for prompt in prompts],
            sampling_params=[
                {
                    "temperature": heat,
                    "max_new_tokens": options.max_new_tokens,
                    "sampling_seed": index,
                }
                for index in range(len(prompts))
            ],
        )
        steps: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(width, np.int64))
        counts: dict[str, int] = defaultdict(int)
        for prompt, output in zip(prompts, outputs):
            counts[prompt.domain] += 1
            # An answer of one token has no verify step and no histogram.
            histogram = output["meta_info"].get("spec_correct_drafts_histogram", [])
            steps[prompt.domain][: len(histogram)] += np.array(histogram, np.int64)
        for domain in sorted(steps):
            more = {"domain": domain, "temperature": heat, "prompts": counts[domain]}
            entries.append(more | summarise(steps[domain]))
        total = summarise(sum(steps.values()))
        entries.append({"domain": "all", "temperature": heat, "prompts": len(prompts)} | total)
        overall[f"{heat:g}"] = total
    return {
        "verify_width": width,
        "max_new_tokens": options.max_new_tokens,
        "overall": overall,
        "domains": entries,
    }


def draw(path: Path, evaluation: dict[str, Any]) -> bool:
    """Acceptance of each slot and the histogram, a line or bar for each temperature; False
    without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no matplotlib: no plot", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for index, (heat, total) in enumerate(evaluation["overall"].items()):
        slots = total["slots"]
        left.plot(range(1, len(slots) + 1), slots, marker="o", label=f"T = {heat}")
        bars = np.array(total["histogram"]) / max(1, sum(total["histogram"]))
        right.bar(np.arange(len(bars)) + 0.4 * index, bars, width=0.4, label=f"T = {heat}")
    left.set(xlabel="slot", ylabel="share of steps that accept it", ylim=(0, 1))
    right.set(xlabel="drafts accepted", ylabel="share of steps")
    left.legend()
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def run(options: argparse.Namespace) -> None:
    """Raises ForkError or FlashMapConfigError when the draft cannot be measured."""
    if not engine_available():
        raise ForkError("measuring needs sglang: run it in the environment of `make venv`.")
    import sglang

    tokenizer = load_tokenizer(options.target)
    width = options.verify_width or read_config(options.draft).block_size + 1
    prompts = held_out(options, tokenizer)
    if options.limit:
        kinds: dict[str, int] = defaultdict(int)
        chosen = []
        for prompt in prompts:
            kinds[prompt.domain] += 1
            if kinds[prompt.domain] <= options.limit:
                chosen.append(prompt)
        prompts = chosen
    engine = sglang.Engine(
        model_path=str(options.target),
        speculative_algorithm="FLASHMAP",
        speculative_draft_model_path=str(options.draft),
        speculative_num_draft_tokens=width,
        log_level="warning",
        **json.loads(options.engine_arguments),
    )
    try:
        evaluation = evaluate(engine, prompts, width, options)
    finally:
        engine.shutdown()
    output = options.output or options.draft
    output.mkdir(parents=True, exist_ok=True)
    if draw(output / "acceptance.png", evaluation):
        evaluation["plot"] = "acceptance.png"
    (output / "evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n")
    if (output / "training.json").exists():
        write_card(output)
    print("\n".join(acceptance_table(evaluation)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--draft", type=Path, required=True, help="a release folder")
    parser.add_argument("--data", type=Path, nargs="+", help="the data it was trained on")
    words = "JSONL lines with prompt and domain"
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help=words)
    parser.add_argument("--limit", type=int, default=0, help="prompts a domain (0: all)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--verify-width", type=int, help="(the block and one)")
    parser.add_argument("--output", type=Path, help="folder of the results (the draft's)")
    words = "JSON object of further sglang.Engine arguments"
    parser.add_argument("--engine-arguments", default="{}", help=words)
    options = parser.parse_args(arguments)
    try:
        run(options)
    except (ForkError, FlashMapConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
