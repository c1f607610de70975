"""Writes prompts as people ask them: `make_prompts.py --count 16000 --output prompts.jsonl`.

Lines of `{"prompt": …, "domain": …}` for `make_data.py --prompts`, from the templates in
scripts/train/asks.json, or `--asks FILE` of the same form (scripts/train/asks.py). Nothing is drawn
twice, and no prompt that drafts are measured on (`--held-out`) is drawn at all; `--part I/N` takes
the I-th of N parts, so that several samplers can share one list.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fork.errors import ForkError
from train.asks import ASKS, Asks, different_asks
from train.prompts import HELD_OUT


def part_of(text: str) -> tuple[int, int]:
    """`"2/3"` as `(2, 3)`."""
    try:
        index, parts = map(int, text.split("/"))
    except ValueError:
        index, parts = 0, 0
    if not 1 <= index <= parts:
        raise argparse.ArgumentTypeError(f"{text} is no part: write the first of three as 1/3")
    return index, parts


def banned_prompts(path: Path) -> set[str]:
    """Raises ForkError when `path` has a line without a prompt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return {json.loads(line)["prompt"] for line in lines if line.strip()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ForkError(
            f"--held-out {path} cannot be read ({error}): give JSONL lines with a prompt."
        ) from None


def make_prompts(options: argparse.Namespace) -> int:
    """How many were written."""
    asks = Asks(options.asks, options.seed)
    drawn = list(different_asks(asks, options.count, banned_prompts(options.held_out)))
    index, parts = options.part
    lines = [
        json.dumps({"prompt": text, "domain": domain}, ensure_ascii=False) + "\n"
        for text, domain in drawn[index - 1 :: parts]
    ]
    options.output.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the JSONL file")
    parser.add_argument("--count", type=int, default=48000, help="prompts in all parts (48000)")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="I/N (1/1)")
    parser.add_argument("--asks", type=Path, default=ASKS, help="templates and fillers")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT, help="prompts to leave out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        written = make_prompts(options)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"make_prompts: {options.output}: {written} prompts", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
