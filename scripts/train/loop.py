"""The training loop.

A step: batch and features of the target, the objective's loss, gradients averaged over the ranks
and clipped, AdamW, moving average. The loss and gradient norm are read back each step: a run that
has gone wrong stops before its weights reach the checkpoint.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from fork.errors import ForkError
from torch import nn

from train import checkpoint
from train.acceptance import Acceptance, measure, measure_sampled
from train.anchors import Batch, BatchSource
from train.draft_config import config_keys
from train.draws import Draws
from train.features import TargetReader
from train.network import Blocks, DraftNetwork
from train.objectives import Example, Objective, OneJump
from train.optimiser import MovingAverage, learning_rate, make_optimiser
from train.parallel import World
from train.recipe import Recipe


def make_example(reader: TargetReader, batch: Batch) -> Example:
    """`batch` with the target's features, on the target's device."""
    batch = batch.to(reader.device)
    hidden, final = reader.read(batch)
    embedded = reader.embedding[batch.tokens.gather(1, batch.anchors)]
    return Example(Blocks(hidden, batch.anchors, embedded), batch.labels, final)


@dataclass
class Curves:
    """Rows `[step, value]`."""

    loss: list[list[float]] = field(default_factory=list)
    accept_length: list[list[float]] = field(default_factory=list)
    sampled_accept_length: list[list[float]] = field(default_factory=list)


class Trainer:
    """One run. `network` and `average` start from `initial` weights where given."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        network: DraftNetwork,
        reader: TargetReader,
        source: BatchSource,
        objective: Callable[[nn.Module], Objective],
        folder: Path,
        world: World,
        initial_from: str = "",
        compile_network: bool = False,
    ) -> None:
        """`objective` is given the moving average's network.

        Raises ForkError when `folder` holds a run of another recipe.
        """
        self.recipe, self.network, self.reader, self.source = recipe, network, reader, source
        self.world, self._folder, self._initial_from = world, folder, initial_from
        self.average = MovingAverage(network, recipe.ema)
        self._optimiser = make_optimiser(network, recipe)
        self._objective = objective(self.average.network)
        self._forward: nn.Module = torch.compile(network) if compile_network else network
        self._one_jump = OneJump(reader, decay=recipe.slot_decay)
        self._autocast = torch.device(world.device).type == "cuda"
        self.step, self.curves, self.seconds = 0, Curves(), 0.0
        self.interrupted = False
        self._last_saved_step = 0
        self._reading = ThreadPoolExecutor(1, "batches")
        self._next: tuple[int, Future[Batch]] | None = None
        self._resume()

    def _resume(self) -> None:
        state = checkpoint.load(self._folder)
        if state is None:
            return
        changed = self.recipe.differences(state["recipe"])
        if state["config"] != config_keys(self.network.config, "float32"):
            changed.append("the draft's config")
        if state["initial_from"] != self._initial_from:
            changed.append("init")
        if changed:
            raise ForkError(
                f"{self._folder} holds a run with another {', '.join(changed)}: "
                "resume with the same arguments or choose another --output."
            )
        self.network.load_state_dict(state["network"])
        self.average.network.load_state_dict(state["average"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = self._last_saved_step = state["step"]
        self.seconds, self.curves = state["seconds"], Curves(**state["curves"])
        self._say(f"resumed at step {self.step}")

    def save(self) -> None:
        """Rank 0 alone writes."""
        if self.world.rank == 0:
            checkpoint.save(self._folder, self._state())
        self._last_saved_step = self.step

    def _state(self) -> dict[str, Any]:
        return {
            "recipe": asdict(self.recipe),
            "config": config_keys(self.network.config, "float32"),
            "initial_from": self._initial_from,
            "network": self.network.state_dict(),
            "average": self.average.network.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curves": asdict(self.curves),
        }

    def run(
        self, *, save_seconds: float, validate_every: int, seconds: float = 0, log_every: int = 20
    ) -> bool:
        """Trains to the recipe's last step, or for `seconds`; whether it is the last.

        Raises ForkError when the loss is not finite.
        """
        stopping = _Interrupts()
        started = saved = time.monotonic()
        spent_before, recent = self.seconds, []
        with stopping:
            while self.step < self.recipe.steps:
                recent.append(self.train_step())
                now = time.monotonic()
                self.seconds = spent_before + now - started
                last = self.step == self.recipe.steps
                if self.step % log_every == 0 or last:
                    mean = sum(recent) / len(recent)
                    self.curves.loss.append([self.step, mean])
                    left = (self.recipe.steps - self.step) * self.seconds / self.step
                    self._say(f"step {self.step}: loss {mean:.4f}, {left:.0f} s left")
                    recent = []
                if validate_every and (self.step % validate_every == 0 or last):
                    self.validate()
                self.interrupted = self.world.any(stopping.asked)
                stop = self.world.any(self.interrupted or (0 < seconds < now - started))
                if stop or last or self.world.any(now - saved > save_seconds):
                    self.save()
                    saved = time.monotonic()
                if stop:
                    self._say(f"stopped at step {self.step}; run it again to go on")
                    break
        return self.step >= self.recipe.steps

    def train_step(self) -> float:
        """One step; its loss."""
        world = self.world
        example = make_example(self.reader, self._batch())
        draws = Draws(self.recipe.seed, self.step, world.rank)
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step)
        self._optimiser.zero_grad(set_to_none=True)
        with self._precision():
            loss = self._objective.loss(
                self._forward, example, draws, self.step / self.recipe.steps
            )
        loss.backward()
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        world.average(p.grad for p in parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
        value, size = torch.stack([loss.detach(), norm]).tolist()
        if world.any(not (math.isfinite(value) and math.isfinite(size))):
            raise ForkError(
                f"the loss is {value} and its gradient {size} at step {self.step}: lower --lr "
                f"(the checkpoint of step {self._last_saved_step} is intact)."
            )
        self._optimiser.step()
        self.average.update(self.network, self.step)
        self.step += 1
        return value

    def _batch(self) -> Batch:
        """This step's, read while the last one was computed."""
        if self._next is None or self._next[0] != self.step:
            self._next = self._read(self.step)
        batch = self._next[1].result()
        self._next = self._read(self.step + 1)
        return batch

    def _read(self, step: int) -> tuple[int, Future[Batch]]:
        world = self.world
        return step, self._reading.submit(self.source.train_batch, step, world.rank, world.size)

    def validate(self, most: int = 8) -> tuple[Acceptance, Acceptance]:
        """Acceptance of the moving average on held-out text, greedy and by rejection at T = 1, each
        on text of its temperature where there is any."""
        network, found = self.average.network, []
        for measured, heat in ((measure, 0.0), (measure_sampled, 1.0)):
            batches = self.source.held_out_batches(most, heat) or self.source.held_out_batches(most)
            with self._precision():
                examples = (make_example(self.reader, batch) for batch in batches)
                found.append(measured(network, self._one_jump, examples))
        greedy, sampled = found
        self.curves.accept_length.append([self.step, greedy.length])
        self.curves.sampled_accept_length.append([self.step, sampled.length])
        self._say(
            f"step {self.step}: accept length {greedy.length:.3f} on held-out text, "
            f"{sampled.length:.3f} at T = 1"
        )
        return greedy, sampled

    def _precision(self):  # noqa: ANN202
        return torch.autocast("cuda", torch.bfloat16) if self._autocast else nullcontext()

    def _say(self, words: str) -> None:
        if self.world.rank == 0:
            print(f"train: {words}", file=sys.stderr, flush=True)


class _Interrupts:
    """Notes SIGINT and SIGTERM while entered, so that a run saves before it ends."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> None:
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _note(self, *_: object) -> None:
        self.asked = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
