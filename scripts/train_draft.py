"""Trains a FlashMap draft: `train_draft.py --target DIR --data DIR --output DIR --stage flow`.

Three stages to choose from (scripts/train/objectives.py): `flow`, then `map` with `--init` the
flow's release; or `one-jump`, the baseline. `--output` holds the checkpoint, from which the same
command goes on, and at the end `release/`, the folder to serve. `--then ARGUMENTS` adds a run with
these arguments changed: it starts with the target loaded, and with `--remember` read.
Several GPUs: `torchrun --nproc-per-node N scripts/train_draft.py …`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fork.errors import ForkError
from train.acceptance_loss import LOSSES
from train.anchors import BatchSource
from train.draft_config import FlashMapConfigError, check_target, new_config
from train.estimate import estimate
from train.features import RememberingReader, TargetReader, load_target, load_tokenizer
from train.loop import Trainer
from train.network import DraftNetwork, parameter_count
from train.objectives import Flow, Map, Objective, OneJump
from train.parallel import World
from train.recipe import STAGES, Recipe
from train.release import read_release, write_release
from train.token_file import TokenFiles

_SHARED = ("target", "data", "max_length", "remember", "device", "dtype", "then")
"""Options that the runs of one command have in common."""


def make_recipe(options: argparse.Namespace) -> Recipe:
    names = Recipe.__dataclass_fields__
    return Recipe(**{name: getattr(options, name) for name in names})


def make_objective(
    recipe: Recipe, reader: TargetReader, average: torch.nn.Module, flow: torch.nn.Module | None
) -> Objective:
    decay = recipe.slot_decay
    if recipe.stage == "flow":
        return Flow(reader, decay=decay)
    if recipe.stage == "one-jump":
        return OneJump(
            reader,
            decay=decay,
            labels=recipe.labels,
            acceptance_weight=recipe.acceptance_weight,
            acceptance_loss=recipe.acceptance_loss,
        )
    return Map(
        reader,
        average,
        flow,
        decay=decay,
        one_jump=recipe.one_jump,
        diagonal=recipe.diagonal,
        data_weight=recipe.data_weight,
        labels=recipe.labels,
    )


def make_network(options: argparse.Namespace, target_config: Any) -> DraftNetwork:
    """A new network, or the one in `--init`."""
    torch.manual_seed(options.seed)
    if options.init:
        config, weights = read_release(options.init)
        check_target(config, target_config)
        network = DraftNetwork(config)
        network.load_state_dict(weights)
        return network
    return DraftNetwork(
        new_config(
            target_config,
            name=options.target_name or options.target.resolve().name,
            hidden_size=options.hidden_size,
            layers=options.layers,
            heads=options.heads or max(1, options.hidden_size // 64),
            intermediate_size=options.intermediate_size or 4 * options.hidden_size,
            cond_dim=options.cond_dim,
            block_size=options.block_size,
            target_layer_ids=options.target_layers,
            noise_gate=options.noise_gate,
        )
    )


def open_target(
    options: argparse.Namespace, world: World, recipe: Recipe
) -> tuple[TargetReader, TokenFiles]:
    files = TokenFiles(options.data)
    model = load_target(options.target, world.device, options.dtype)
    vocab_size = model.config.get_text_config().vocab_size
    tokenizer = load_tokenizer(options.target)
    files.check_tokenizer(tokenizer, vocab_size, options.target.resolve().name)
    layers = make_network(options, model.config).config.target_layer_ids
    if options.remember:
        return RememberingReader(model, layers, files, recipe.max_length), files
    return TargetReader(model, layers), files


def make_trainer(
    options: argparse.Namespace,
    world: World,
    opened: tuple[TargetReader, TokenFiles] | None = None,
) -> tuple[Trainer, TokenFiles]:
    """`opened`: what an earlier run of the command has read.

    Raises ForkError or FlashMapConfigError when the run cannot start.
    """
    recipe = make_recipe(options)
    if recipe.stage == "map" and not options.init:
        raise ForkError("--stage map distils a flow: pass --init, the release of a --stage flow.")
    reader, files = opened or open_target(options, world, recipe)
    network = make_network(options, reader.config).to(world.device)
    if network.config.target_layer_ids != reader.layer_ids:
        raise ForkError(
            f"the draft of --then reads the target's layers {network.config.target_layer_ids}, the "
            f"first one {reader.layer_ids}: train it with a command of its own."
        )
    flow = None
    if recipe.stage == "map":
        flow = make_network(options, reader.config).to(world.device).requires_grad_(False)
    source = BatchSource(
        files,
        batch_size=recipe.batch_size,
        anchors=recipe.anchors,
        block_size=network.config.block_size,
        max_length=recipe.max_length,
        seed=recipe.seed,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        recipe,
        network=network,
        reader=reader,
        source=source,
        objective=lambda average: make_objective(recipe, reader, average, flow),
        folder=options.output,
        world=world,
        initial_from=str(options.init or ""),
        compile_network=options.compile,
    )
    return trainer, files


def record(trainer: Trainer, files: TokenFiles, options: argparse.Namespace) -> dict[str, Any]:
    """training.json: this run, after those its weights came from."""
    earlier = []
    if options.init and (options.init / "training.json").exists():
        earlier = json.loads((options.init / "training.json").read_text())["runs"]
    cuda = torch.device(trainer.world.device).type == "cuda"
    run = {
        "recipe": asdict(trainer.recipe),
        "curves": asdict(trainer.curves),
        "steps_done": trainer.step,
        "seconds": trainer.seconds,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": trainer.world.size,
    }
    return {
        "parameters": parameter_count(trainer.network.config),
        "data": {
            "target": files.meta.target,
            "conversations": len(files),
            "tokens": int(files.lengths().sum()),
            "temperatures": sorted(set(files.temperatures().tolist())),
        },
        "runs": [*earlier, run],
    }


def train(runs: list[argparse.Namespace], world: World) -> None:
    opened = None
    for options in runs:
        trainer, files = make_trainer(options, world, opened)
        opened = trainer.reader, files
        if options.dry_run:
            print(estimate(trainer))
            continue
        train_one(trainer, files, options)
        if trainer.interrupted:
            return


def train_one(trainer: Trainer, files: TokenFiles, options: argparse.Namespace) -> None:
    done = trainer.run(
        save_seconds=options.save_seconds,
        validate_every=options.validate_every,
        seconds=options.seconds,
    )
    if trainer.world.rank == 0 and (done or options.release_early):
        network = trainer.average.network
        network.config.draft_vocab_size = options.draft_vocab_size
        write_release(
            options.output / "release",
            network,
            flow_map=trainer.recipe.stage != "flow",
            counts=files.answer_counts(),
            record=record(trainer, files, options),
            dtype=options.release_dtype,
        )
        print(options.output / "release")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, required=True, help="the target's folder")
    add("--target-name", help="its name in the config (the folder's)")
    add("--data", type=Path, nargs="+", required=True, help="folders of make_data.py")
    add("--output", type=Path, required=True, help="the run's folder")
    add("--stage", choices=STAGES, required=True)
    add("--init", type=Path, help="a release to start from; its sizes are used")
    add("--then", action="append", default=[], help="a run after it, with these arguments changed")
    add("--dry-run", action="store_true", help="print memory and time, save nothing")
    for name, default, words in (
        ("hidden-size", 384, "of the draft (384)"),
        ("layers", 3, "of the draft (3)"),
        ("heads", None, "(width / 64)"),
        ("intermediate-size", None, "of the MLP (4 · width)"),
        ("cond-dim", 64, "of the time conditioning (64)"),
        ("block-size", 8, "tokens drafted (8)"),
        ("draft-vocab-size", 0, "tokens a server drafts from, most frequent first (0: all)"),
        ("steps", 8000, "of this run (8000)"),
        ("batch-size", 32, "conversations a rank (32)"),
        ("anchors", 32, "blocks a conversation (32)"),
        ("max-length", 1024, "tokens of a conversation (1024)"),
        ("seed", 0, ""),
        ("validate-every", 500, "steps; 0: never (500)"),
    ):
        add(f"--{name}", type=int, default=default, help=words)
    add("--target-layers", type=int, nargs="+", help="layers read (five, spread)")
    add("--noise-gate", choices=("jump", "constant"), default="jump")
    for name, field, default, words in (
        ("lr", "learning_rate", 2e-3, "peak learning rate (0.002)"),
        ("weight-decay", "weight_decay", 0.01, "(0.01)"),
        ("warmup", "warmup", 0.03, "share of the steps (0.03)"),
        ("clip", "clip", 1.0, "gradient norm (1)"),
        ("ema", "ema", 0.999, "decay of the moving average (0.999)"),
        ("slot-decay", "slot_decay", 5.0, "slots over which the loss weight falls by e (5)"),
        ("one-jump-share", "one_jump", 0.5, "map: share of blocks that jump 0 to 1 (0.5)"),
        ("diagonal-share", "diagonal", 0.25, "map: share of blocks on the diagonal (0.25)"),
        ("data-weight", "data_weight", 0.0, "map: weight of the one-jump term (0)"),
        (
            "acceptance-weight",
            "acceptance_weight",
            0.0,
            "one-jump, target labels: share of the loss on what rejection sampling keeps (0)",
        ),
    ):
        add(f"--{name}", dest=field, type=float, default=default, help=words)
    add("--labels", choices=("tokens", "target"), default="tokens", help="of the one-jump term")
    add("--acceptance-loss", choices=LOSSES, default="length", help="that share's loss (length)")
    add("--save-seconds", type=float, default=45, help="between checkpoints (45)")
    add("--seconds", type=float, default=0, help="save and stop after this long (0: no limit)")
    add("--release-early", action="store_true", help="write release/ also when stopped")
    add("--release-dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    add(
        "--remember", action="store_true", help="read the target once and keep its states in memory"
    )
    add("--compile", action="store_true", help="torch.compile the network")
    add("--device", help="cuda or cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the target")
    return parser.parse_args(arguments)


def parse_runs(arguments: list[str] | None) -> list[argparse.Namespace]:
    """The options of the command's run, and of each `--then`.

    Raises ForkError when one cannot start, or cannot share a command with the first.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    first = parse(arguments)
    runs = [first, *(parse([*arguments, *shlex.split(words)]) for words in first.then)]
    for options in runs:
        make_recipe(options)
        for name in _SHARED:
            if getattr(options, name) != getattr(first, name):
                raise ForkError(
                    f"--then changes --{name.replace('_', '-')}, which the runs of a command "
                    "share: train it with a command of its own."
                )
    return runs


def main(arguments: list[str] | None = None) -> int:
    try:
        runs = parse_runs(arguments)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    world = World.join(runs[0].device)
    try:
        train(runs, world)
        world.wait()
    except (ForkError, FlashMapConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        world.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
