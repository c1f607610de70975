"""Makes training data for a draft: `make_data.py --target DIR --output DIR`.

The target answers prompts, from `--prompts` files or written by itself, at several temperatures.
The output is a data folder (scripts/train/token_file.py) that `train_draft.py --data` reads.
Killed, it goes on where it stopped when run again with the same arguments; `--seconds` stops it in
time by itself.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from fork.errors import ForkError
from train.features import load_target, load_tokenizer
from train.prompts import (
    OPENINGS,
    ChatTemplate,
    Prompt,
    load_prompts,
    read_prompts,
    save_prompts,
)
from train.sampling import (
    EngineSampler,
    Request,
    Sampler,
    TransformersSampler,
    engine_available,
    stop_token_ids,
)
from train.token_file import Meta, Sequence, TokenWriter


def say(words: str) -> None:
    print(f"make_data: {words}", file=sys.stderr, flush=True)


def write_turns(sampler: Sampler, tokenizer: Any, options: argparse.Namespace) -> list[Prompt]:
    """`options.count` user turns written by the target, domains in equal parts."""
    template = ChatTemplate(tokenizer)
    turn_end = template.after[0] if template.known and template.after else None
    stops = stop_token_ids(options.target, tokenizer)
    choose = random.Random(options.seed)
    domains = list(OPENINGS)
    prompts: list[Prompt] = []
    asked = batch_number = 0
    while len(prompts) < options.count:
        kinds = [domains[(asked + i) % len(domains)] for i in range(options.batch_size)]
        asked += len(kinds)
        heads = [template.opening(choose.choice(OPENINGS[kind])) for kind in kinds]
        requests = [Request(ids, 1.0, options.prompt_tokens) for ids in heads]
        stop_ids = [*stops, *([turn_end] if turn_end is not None else [])]
        turns = sampler.answer(requests, stop_ids, options.seed * 7919 + batch_number)
        batch_number += 1
        for kind, head, turn in zip(kinds, heads, turns):
            words = [token for token in turn if token not in stop_ids]
            if words and len(words) < len(turn):  # ended by itself
                prompts.append(Prompt(head + words + template.after, kind))
        say(f"{len(prompts)} of {options.count} prompts written by the target")
        if batch_number > 20 and len(prompts) < batch_number:
            raise ForkError("the target writes hardly any user turns: pass --prompts FILE.")
    return prompts[: options.count]


def answer(
    sampler: Sampler,
    prompts: list[Prompt],
    writer: TokenWriter,
    stops: list[int],
    options: argparse.Namespace,
) -> None:
    started, done, tokens = time.monotonic(), writer.count, 0
    while writer.count < len(prompts):
        batch = prompts[writer.count : writer.count + options.batch_size]
        cycle = options.temperatures
        heats = [cycle[(writer.count + i) % len(cycle)] for i in range(len(batch))]
        requests = [
            Request(prompt.ids, heat, options.max_new_tokens)
            for prompt, heat in zip(batch, heats)
        ]
        answers = sampler.answer(requests, stops, options.seed * 104729 + writer.count)
        writer.append(
            Sequence(np.array(prompt.ids + new), len(prompt.ids), heat)
            for prompt, new, heat in zip(batch, answers, heats)
        )
        tokens += sum(map(len, answers))
        spent = time.monotonic() - started
        left = (len(prompts) - writer.count) * spent / (writer.count - done)
        say(
            f"{writer.count} of {len(prompts)} answers, {tokens} tokens, "
            f"{tokens / spent:.0f} tokens/s, {left:.0f} s left"
        )
        if options.seconds and spent > options.seconds and writer.count < len(prompts):
            say("stopping: --seconds are over; run it again for the rest")
            return


def make_data(options: argparse.Namespace) -> None:
    """Raises ForkError when the data cannot be made."""
    tokenizer = load_tokenizer(options.target)
    longest = max(1, options.max_length - options.max_new_tokens)
    given = None
    if options.prompts:
        given = read_prompts(options.prompts, tokenizer, raw=options.raw)
        given = [prompt for prompt in given if len(prompt.ids) <= longest]
        if not given:
            raise ForkError(
                f"every prompt in --prompts is longer than {longest} tokens: raise --max-length."
            )
    elif not ChatTemplate(tokenizer).known:
        ChatTemplate(tokenizer).opening("")
    use_engine = options.sampler == "engine" or (options.sampler == "auto" and engine_available())
    target_config, name = None, options.target_name or options.target.resolve().name
    if use_engine:
        from transformers import AutoConfig

        target_config = AutoConfig.from_pretrained(options.target)
        sampler: Any = EngineSampler(
            options.target, random_seed=options.seed, **json.loads(options.engine_arguments)
        )
    else:
        model = load_target(options.target, options.device, options.dtype)
        target_config, sampler = model.config, TransformersSampler(model)
    try:
        vocab_size = target_config.get_text_config().vocab_size
        writer = TokenWriter(options.output, Meta.of(name, vocab_size, tokenizer))
        stored = options.output / "prompts.jsonl"
        if not stored.exists():
            if writer.count:
                raise ForkError(f"{stored} is gone, but its answers are there: choose another.")
            prompts = given or write_turns(sampler, tokenizer, options)
            random.Random(options.seed).shuffle(prompts)
            save_prompts(stored, prompts)
        prompts = load_prompts(stored)
        answer(sampler, prompts, writer, stop_token_ids(options.target, tokenizer), options)
        writer.close()
    finally:
        if use_engine:
            sampler.close()
    kinds = Counter(prompt.domain for prompt in prompts[: writer.count])
    say(f"{options.output}: {writer.count} conversations, {dict(sorted(kinds.items()))}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--target-name", help="its name in the data and the card (the folder's)")
    parser.add_argument("--output", type=Path, required=True, help="the data folder")
    words = "JSONL or text files of prompts (none: the target writes them itself)"
    parser.add_argument("--prompts", type=Path, nargs="+", help=words)
    parser.add_argument("--raw", action="store_true", help="prompts without the chat template")
    parser.add_argument("--count", type=int, default=20000, help="prompts to write (20000)")
    words = "cycled over the prompts (0 0.7 1)"
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help=words
    )
    parser.add_argument("--max-new-tokens", type=int, default=320, help="of an answer (320)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of a written turn (128)")
    parser.add_argument("--max-length", type=int, default=1024, help="of a conversation (1024)")
    parser.add_argument("--batch-size", type=int, default=512, help="requests at once (512)")
    words = "auto: our engine where sglang is installed, else transformers"
    parser.add_argument(
        "--sampler", choices=("auto", "engine", "transformers"), default="auto", help=words
    )
    words = "JSON object of further sglang.Engine arguments"
    parser.add_argument("--engine-arguments", default="{}", help=words)
    parser.add_argument("--device", help="of the transformers sampler (cuda where there is one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seconds", type=float, default=0, help="stop after about this long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        make_data(options)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
