"""Accept length of drafts by domain: `eval_draft.py --target DIR --draft DIR --data DIR…`.

Answers the held-out prompts (scripts/train/heldout.jsonl: chat, code, math, copying, multilingual)
with FLASHMAP in our own engine, at T = 0 and T = 1, and reads from every answer how many drafts
each of its verify steps accepted. Prompts that share more than half of their 8-grams with the
training data are left out. Prints one table; writes evaluation.json, acceptance.png and the model
card anew into `--output` (the draft's folder). `--draft A --draft B` compares drafts on the same
prompts, in one table and, with `--output`, one picture. How fast a draft makes the server is
another question: benchmark/flashmap/demo_speed.py.
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
from train.pictures import load_pyplot
from train.prompts import HELD_OUT, Prompt, first_of_each_domain, read_prompts
from train.sampling import engine_available
from train.token_file import TokenFiles

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
        "arguments": speculative_arguments(options.engine_arguments),
        "max_new_tokens": options.max_new_tokens,
        "overall": overall,
        "domains": entries,
    }


def speculative_arguments(engine_arguments: str) -> dict[str, Any]:
    """Those of the JSON `engine_arguments` that say how drafts are made and verified."""
    given = json.loads(engine_arguments)
    return {name: value for name, value in given.items() if name.startswith("speculative_")}


def draw(path: Path, evaluations: dict[str, dict[str, Any]]) -> bool:
    """A picture of drafts' `evaluations` by name: acceptance of each slot, and accept lengths by
    domain, a line or bar for each draft and temperature. False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    runs = []
    for name, evaluation in evaluations.items():
        for heat in evaluation["overall"]:
            label = f"T = {heat}" if len(evaluations) == 1 else f"{name}, T = {heat}"
            entries = [e for e in evaluation["domains"] if f"{e['temperature']:g}" == heat]
            runs.append((label, evaluation["overall"][heat]["slots"], entries))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), width_ratios=(2, 3))
    share = 0.8 / len(runs)
    for index, (label, slots, entries) in enumerate(runs):
        left.plot(range(1, len(slots) + 1), slots, marker="o", label=label)
        places = np.arange(len(entries)) + share * (index - (len(runs) - 1) / 2)
        right.bar(places, [entry["accept_length"] for entry in entries], share, label=label)
    left.set(xlabel="slot", ylabel="share of steps that accept it", ylim=(0, 1))
    right.set(ylabel="tokens a target pass")
    right.axhline(1.0, color="black", linewidth=0.8)
    names = [entry["domain"] for entry in runs[0][2]]
    right.set_xticks(range(len(names)), names, rotation=20)
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def chosen_prompts(options: argparse.Namespace, tokenizer: Any) -> list[Prompt]:
    """The held-out prompts, `--limit` of each domain."""
    prompts = held_out(options, tokenizer)
    return first_of_each_domain(prompts, options.limit) if options.limit else prompts


def measure(draft: Path, prompts: list[Prompt], options: argparse.Namespace) -> dict[str, Any]:
    """Answers `prompts` with `draft` in an engine of its own."""
    import sglang

    width = options.verify_width or read_config(draft).block_size + 1
    engine = sglang.Engine(
        model_path=str(options.target),
        speculative_algorithm="FLASHMAP",
        speculative_draft_model_path=str(draft),
        speculative_num_draft_tokens=width,
        log_level="warning",
        **json.loads(options.engine_arguments),
    )
    try:
        return evaluate(engine, prompts, width, options)
    finally:
        engine.shutdown()


def record(folder: Path, evaluation: dict[str, Any]) -> None:
    """Writes evaluation.json, the picture and, in a release folder, the card."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / "evaluation.json"
    numbers.write_text(json.dumps(evaluation, indent=1) + "\n")
    if draw(folder / "acceptance.png", {folder.name: evaluation}):
        evaluation["plot"] = "acceptance.png"
        numbers.write_text(json.dumps(evaluation, indent=1) + "\n")
    if (folder / "training.json").exists():
        write_card(folder)


def run(options: argparse.Namespace) -> None:
    """Raises ForkError or FlashMapConfigError when a draft cannot be measured."""
    if not engine_available():
        raise ForkError("measuring needs sglang: run it in the environment of `make venv`.")
    names = draft_names(options.draft)
    prompts = chosen_prompts(options, load_tokenizer(options.target))
    evaluations = {}
    for name, draft in zip(names, options.draft):
        evaluations[name] = measure(draft, prompts, options)
        several = len(names) > 1
        folder = draft if options.output is None else options.output / (name if several else "")
        record(folder, evaluations[name])
    if options.output is not None and len(names) > 1:
        draw(options.output / "drafts.png", evaluations)
    print("\n".join(comparison(evaluations)))


def draft_names(drafts: list[Path]) -> list[str]:
    """What to call each draft: its folder's name, with as many parents as tell them apart.

    Raises ForkError when a folder is given twice.
    """
    paths = [draft.resolve() for draft in drafts]
    if len(set(paths)) < len(paths):
        raise ForkError("--draft names the same folder twice: give each draft once.")
    names, depth = [path.name for path in paths], 1
    while len(set(names)) < len(paths):
        depth += 1
        names = ["-".join(path.parts[-depth:]) for path in paths]
    return names


def comparison(evaluations: dict[str, dict[str, Any]]) -> list[str]:
    """One table of all drafts, a column of their names where there are several."""
    if len(evaluations) == 1:
        return acceptance_table(*evaluations.values())
    most = max(evaluation["verify_width"] for evaluation in evaluations.values())
    lines: list[str] = []
    for name, evaluation in evaluations.items():
        head, rule, *rows = acceptance_table(evaluation, slots=most - 1)
        lines = lines or [f"| draft {head}", f"|---{rule}"]
        lines += [f"| {name} {row}" for row in rows]
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    words = "a release folder; several, each with its own --draft, are compared"
    parser.add_argument("--draft", type=Path, required=True, action="append", help=words)
    parser.add_argument("--data", type=Path, nargs="+", help="the data it was trained on")
    words = "JSONL lines with prompt and domain"
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help=words)
    parser.add_argument("--limit", type=int, default=0, help="prompts a domain (0: all)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--verify-width", type=int, help="(the block and one)")
    words = "folder of the results (each draft's own); of several drafts, with a folder for each"
    parser.add_argument("--output", type=Path, help=words)
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
