"""`--dry-run`: what a run will need, from its sizes and some real steps."""

from __future__ import annotations

import resource
import statistics
import time

import torch

from train.loop import Trainer
from train.network import parameter_count
from train.vocabulary_loss import chunk_rows

_STEPS = 8
_WARM = 3
"""The first steps compile kernels and fill caches."""


def estimate(trainer: Trainer) -> str:
    """Takes steps of `trainer` (nothing is saved); a table of memory and time."""
    recipe, config, source = trainer.recipe, trainer.network.config, trainer.source
    count = parameter_count(config)
    networks = 3 if recipe.stage == "map" else 2
    vocab = config.vocab_size
    slots = recipe.batch_size * recipe.anchors * config.block_size
    chunk = min(slots, chunk_rows(vocab)) * vocab * 4
    target = sum(p.numel() * p.element_size() for p in trainer.reader.parameters())
    cuda = torch.device(trainer.world.device).type == "cuda"
    times = []
    for _ in range(_STEPS):
        started = time.monotonic()
        trainer.train_step()
        times.append(time.monotonic() - started)
    second = statistics.median(times[_WARM:])
    if cuda:
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows = [
        ("draft", f"{count / 1e6:.2f}M parameters, {2 * count / 1e6:.1f} MB in bfloat16"),
        ("target", f"{target / 1e6:.0f} MB"),
        ("weights, gradients, Adam, average", f"{(4 * networks + 12) * count / 1e6:.0f} MB"),
        ("logits in memory at a time", f"{chunk / 1e6:.0f} MB, up to 4 of them"),
        ("peak measured", f"{peak / 1e6:.0f} MB of {'GPU' if cuda else 'process'}"),
        ("checkpoint", f"{16 * count / 1e6:.0f} MB"),
        ("data", f"{source.tokens / 1e6:.2f}M tokens, {source.batches_per_epoch} batches an epoch"),
        ("a step", f"{second:.3f} s, {slots} slots on each of {trainer.world.size} ranks"),
        ("all steps", f"{recipe.steps} · {second:.3f} s = {recipe.steps * second:.0f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
