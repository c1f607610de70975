"""Tokens per second of plain decoding and of FLASHMAP, side by side on real prompts.

    python benchmark/flashmap/demo_speed.py                # the demo model and its shipped draft
    python benchmark/flashmap/demo_speed.py --target DIR --draft DIR --widths 5 9
    python benchmark/flashmap/demo_speed.py --widths 9 17 --arguments \
        '{"speculative_flashmap_tree_candidates": 1, "speculative_flashmap_tree_choices": 8}'

One request at a time, on a GPU where there is one. The held-out prompts of scripts/eval_draft.py go
to the plain engine and then to FLASHMAP, so that what else the machine does falls on both. Seconds
are those of the whole answer, its prefill included; the ratio of a row is that of the summed
seconds per token. The table tells too how many greedy answers were the same token by token: all
in float32.

Several widths and one more engine for each are fine on a CPU; on a GPU they share its memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "scripts")]
from engine_process import Answer, EngineProcess  # noqa: E402

DRAFT = ROOT / "drafts" / "smollm2-135m-instruct"


def start(width: int | None, options: argparse.Namespace) -> EngineProcess:
    """The engine of a verify width; 0: plain, None: FLASHMAP's own choice."""
    arguments = dict(
        model_path=str(options.target),
        dtype=options.dtype,
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        max_running_requests=1,
        max_total_tokens=8192,
        mem_fraction_static=0.9 if options.device == "cpu" else 0.8 / (1 + len(options.widths)),
        device=options.device,
        log_level="error",
        sleep_on_idle=True,
    )
    if width != 0:
        arguments |= dict(
            speculative_algorithm="FLASHMAP",
            speculative_draft_model_path=str(options.draft),
            speculative_num_draft_tokens=width,
        )
        arguments |= json.loads(options.arguments)
        if options.draft_vocab_size is not None:
            arguments["speculative_flashmap_draft_vocab_size"] = options.draft_vocab_size
    environment = {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}
    return EngineProcess(arguments, environment, by_cpu=options.clock == "cpu")


def prompts(options: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """``(domain, token ids)`` of the first ``--limit`` prompts of each domain."""
    from train.features import load_tokenizer
    from train.prompts import HELD_OUT, first_of_each_domain, read_prompts

    known = read_prompts([HELD_OUT], load_tokenizer(options.target))
    return [(prompt.domain, prompt.ids) for prompt in first_of_each_domain(known, options.limit)]


def row(name: str, plain: list[Answer], ours: list[Answer]) -> str:
    """One line of the table."""

    def rate(answers: list[Answer]) -> float:
        return sum(len(a.tokens) for a in answers) / sum(a.seconds for a in answers)

    steps = sum(a.steps for a in ours)
    length = sum(len(a.tokens) - 1 for a in ours) / max(1, steps)
    same = sum(a.tokens == b.tokens for a, b in zip(plain, ours, strict=True))
    return (
        f"| {name} | {rate(plain):.1f} | {rate(ours):.1f} | {rate(ours) / rate(plain):.2f}× | "
        f"{length:.2f} | {same} of {len(ours)} |"
    )


def run(options: argparse.Namespace) -> None:
    sampling = dict(
        temperature=options.temperature, max_new_tokens=options.max_new_tokens, sampling_seed=1
    )
    engines: dict[int | None, EngineProcess] = {}
    domains = []
    try:
        for width in (0, *options.widths):
            engines[width] = start(width, options)
        answers: dict[int | None, list[Answer]] = {width: [] for width in engines}
        chosen = prompts(options)
        for engine in engines.values():
            engine.answer(chosen[0][1], **sampling)  # warm-up
        for domain, ids in chosen:
            domains.append(domain)
            for width, engine in engines.items():
                answers[width].append(engine.answer(ids, **sampling))
    finally:
        for engine in engines.values():
            engine.stop()
    print(f"{options.dtype}, {options.device}, temperature {options.temperature:g}, ", end="")
    print(f"{options.clock} time, {len(chosen)} prompts, {options.max_new_tokens} tokens at most")
    print("| W, domain | plain tok/s | FLASHMAP tok/s | ratio | accept length | same text |")
    print("|---|---|---|---|---|---|")
    for width in options.widths:
        for domain in (*dict.fromkeys(domains), "all"):
            picked = [i for i, name in enumerate(domains) if domain in (name, "all")]
            plain, ours = ([answers[key][i] for i in picked] for key in (0, width))
            print(row(f"{width or 'default'}, {domain}", plain, ours))
    if options.json:
        record = {
            str(width): [dict(seconds=a.seconds, tokens=len(a.tokens), steps=a.steps) for a in made]
            for width, made in answers.items()
        }
        options.json.write_text(json.dumps(dict(domains=domains, answers=record)) + "\n")


def demo_target() -> Path:
    """The demo model's folder, made where it is missing."""
    command = [sys.executable, str(ROOT / "scripts" / "demo_target.py")]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise SystemExit(result.returncode)
    return Path(result.stdout.split("\n")[-2])


def main() -> None:
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="default: the demo model")
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--widths", type=int, nargs="+", default=[None], help="verify widths")
    parser.add_argument("--arguments", default="{}", help="JSON of FLASHMAP's engine arguments")
    parser.add_argument("--draft-vocab-size", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of a CPU")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="see cpu_step.py")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, default=3, help="prompts a domain")
    parser.add_argument("--json", type=Path, help="JSON of every answer")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.target = options.target or demo_target()
    run(options)


if __name__ == "__main__":
    main()
