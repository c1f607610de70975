"""Accept length, speed and text of several engines on the held-out prompts, side by side.

    python benchmark/flashmap/demo_modes.py --target DIR --draft DIR --out out/modes \
        'chain={}' 'tree={"speculative_flashmap_tree_candidates": 8}'

Every mode is a name and the engine arguments it adds to FLASHMAP's; `plain` (no draft) always
comes along. Engines start at once, on one GPU or CPU; when all are up they measure one after
another, and then once more: a small model waits for the processor, which those that start or end
beside it take, so a mode's time is the shorter of `--turns`, and both are printed. At each batch
size all prompts are answered greedily, `batch size` at a time; seconds are those of whole answers,
prefill included. A row tells how many of its texts are those of `plain`
token by token: in bfloat16 near-ties of logits fall differently when a forward has more rows, and
the largest gap between the two best logprobs of `plain` where a text first differs is printed
beside it. `--speed DRAFT/speed.json` leaves the ratios for the draft's model card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
from turn import alone, await_turn, end_turn, give_turns, start  # noqa: E402

PLAIN = "plain"


def prompts(options: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """`(domain, token ids)` of the first `--limit` prompts of each domain."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from train.features import load_tokenizer
    from train.prompts import HELD_OUT, first_of_each_domain, read_prompts

    known = read_prompts([HELD_OUT], load_tokenizer(options.target))
    return [(prompt.domain, prompt.ids) for prompt in first_of_each_domain(known, options.limit)]


def engine(options: argparse.Namespace, more: dict[str, Any]) -> Any:
    import sglang

    arguments: dict[str, Any] = dict(
        model_path=str(options.target),
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        max_running_requests=max(options.batch_sizes),
        max_total_tokens=max(options.batch_sizes) * 1024,
        log_level="warning",
        random_seed=0,
        sleep_on_idle=True,  # the others measure meanwhile
    )
    if options.mode != PLAIN:
        arguments |= dict(
            speculative_algorithm="FLASHMAP", speculative_draft_model_path=str(options.draft)
        )
    return sglang.Engine(**(arguments | json.loads(options.common) | more))


def answer_all(
    running: Any, chosen: list[tuple[str, list[int]]], size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """All prompts, `size` at a time."""
    sampling = {"temperature": options.temperature, "max_new_tokens": options.max_new_tokens}
    started, outputs = time.perf_counter(), []
    for first in range(0, len(chosen), size):
        ids = [prompt for _, prompt in chosen[first : first + size]]
        outputs += running.generate(
            input_ids=ids,
            sampling_params=[
                sampling | {"sampling_seed": first + index} for index in range(len(ids))
            ],
            return_logprob=size == 1 and options.mode == PLAIN,
            top_logprobs_num=2,
        )
    seconds = time.perf_counter() - started
    infos = [output["meta_info"] for output in outputs]
    row: dict[str, Any] = {
        "seconds": seconds,
        "tokens": [output["output_ids"] for output in outputs],
        "steps": [info.get("spec_verify_ct") or info["completion_tokens"] - 1 for info in infos],
    }
    if "output_top_logprobs" in infos[0]:
        row["gaps"] = [
            [best[0][0] - best[1][0] for best in info["output_top_logprobs"]] for info in infos
        ]
    return row


def run(options: argparse.Namespace) -> None:
    """One mode, in a process of its own."""
    chosen = prompts(options)
    running = engine(options, json.loads(options.arguments))
    result: dict[str, Any] = {"domains": [domain for domain, _ in chosen], "batches": {}}
    turn = options.out / f"{options.mode}.turn"
    for number in range(options.turns):
        await_turn(turn, number)
        with alone():
            for size in options.batch_sizes:
                answer_all(running, chosen[:size], size, options)  # warm-up
                row = answer_all(running, chosen, size, options)
                best = result["batches"].setdefault(str(size), row | {"turns": []})
                best["turns"].append(row["seconds"])
                best["seconds"] = min(best["turns"])
        end_turn(turn, number)
    (options.out / f"{options.mode}.json").write_text(json.dumps(result))
    running.shutdown()


def compare(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    modes = {PLAIN: "{}"} | dict(mode.split("=", 1) for mode in options.modes)
    started = {}
    for name, arguments in modes.items():
        command = [sys.executable, __file__, "--mode", name, "--arguments", arguments]
        turn = options.out / f"{name}.turn"
        process = start([*command, *options.passed_on], turn, options.out / f"{name}.log")
        started[name] = (turn, process)
    died = give_turns(list(started.values()), options.turns)
    failed = [name for name, (_, process) in started.items() if process in died]
    made = {
        name: json.loads((options.out / f"{name}.json").read_text())
        for name in modes
        if name not in failed
    }
    for name in failed:
        print(f"{name} failed: see {options.out / name}.log", file=sys.stderr)
    if PLAIN in made:
        print("\n".join(table(made)))
        if options.speed:
            record = speed_record(made, modes, options.temperature, device_name())
            options.speed.write_text(json.dumps(record, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(made))
    if failed:
        sys.exit(1)


def tokens_per_second(row: dict[str, Any]) -> float:
    return sum(map(len, row["tokens"])) / row["seconds"]


def table(made: dict[str, Any]) -> list[str]:
    rows = [
        "| mode | requests | tok/s | each turn | ratio to plain | accept length | same text | "
        "largest gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = made[PLAIN]
    gaps = plain["batches"].get("1", {}).get("gaps")
    for size, base in plain["batches"].items():
        for name, result in made.items():
            row = result["batches"][size]
            count, steps = sum(map(len, row["tokens"])), sum(row["steps"])
            rate = tokens_per_second(row)
            ratio = rate / tokens_per_second(base)
            turns = ", ".join(f"{count / seconds:.0f}" for seconds in row["turns"])
            length = (count - len(row["tokens"])) / max(1, steps)
            splits = [_first_difference(a, b) for a, b in zip(row["tokens"], base["tokens"])]
            differ = [(i, at) for i, at in enumerate(splits) if at is not None]
            worst = ""
            if gaps and name != PLAIN and differ:
                worst = f"{max(gaps[i][at] for i, at in differ if at < len(gaps[i])):.3f}"
            rows.append(
                f"| {name} | {size} | {rate:.0f} | {turns} | {ratio:.2f}× | {length:.2f} | "
                f"{len(splits) - len(differ)} of {len(splits)} | {worst} |"
            )
    rows += ["", "| mode, accept length of | " + " | ".join(dict.fromkeys(plain["domains"])) + " |"]
    rows.append("|---|" + "---|" * len(set(plain["domains"])))
    for name, result in made.items():
        if name == PLAIN:
            continue
        row, cells = next(iter(result["batches"].values())), []
        for domain in dict.fromkeys(result["domains"]):
            picked = [i for i, kind in enumerate(result["domains"]) if kind == domain]
            steps = sum(row["steps"][i] for i in picked)
            cells.append(f"{sum(len(row['tokens'][i]) - 1 for i in picked) / max(1, steps):.2f}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def speed_record(
    made: dict[str, Any], modes: dict[str, str], temperature: float, device: str
) -> dict[str, Any]:
    """Tokens per second of each mode at each batch size, as `scripts/train/card.py` reads them."""
    rows = []
    for size, base in made[PLAIN]["batches"].items():
        for name, result in made.items():
            rate = tokens_per_second(result["batches"][size])
            rows.append(
                dict(
                    mode=name,
                    requests=int(size),
                    tokens_per_second=rate,
                    ratio=rate / tokens_per_second(base),
                    arguments=json.loads(modes[name]),
                )
            )
    prompts = len(made[PLAIN]["domains"])
    return dict(device=device, temperature=temperature, prompts=prompts, rows=rows)


def _first_difference(one: list[int], other: list[int]) -> int | None:
    if one == other:
        return None
    pairs = enumerate(zip(one, other))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", help="NAME=JSON of engine arguments")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    parser.add_argument("--json", type=Path, help="save all modes' answers in one file")
    parser.add_argument("--speed", type=Path, help="save the ratios for the draft's card")
    parser.add_argument("--common", default="{}", help="JSON of every engine's arguments")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=2, help="how often a mode measures")
    parser.add_argument("--limit", type=int, default=20, help="prompts a domain")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode:
        run(options)
        return
    passed_on = ["--target", options.target, "--draft", options.draft, "--out", options.out]
    passed_on += ["--common", options.common, "--temperature", options.temperature]
    passed_on += ["--max-new-tokens", options.max_new_tokens, "--limit", options.limit]
    passed_on += ["--turns", options.turns]
    options.passed_on = [*map(str, passed_on), "--batch-sizes", *map(str, options.batch_sizes)]
    compare(options)


if __name__ == "__main__":
    main()
