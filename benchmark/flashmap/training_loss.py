"""Times the trainer's losses through the LM head, and checks the acceptance loss on the GPU.

    python benchmark/flashmap/training_loss.py

`--rows` blocks' slots at SmolLM2-135M's sizes: cross-entropy with the target's distributions, and
`--acceptance-weight 1` with each of its losses; milliseconds of loss and gradient in bfloat16, and
how far the kernels are from the readable form. Needs one NVIDIA GPU, torch and triton alone.
"""

from __future__ import annotations

import argparse
import statistics as means
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from train.acceptance_loss import (  # noqa: E402
    LOSSES,
    Terms,
    acceptance_value,
    gradient,
    statistics,
    terms_loss,
)
from train.vocabulary_loss import Heads, cross_entropy, head_logits  # noqa: E402

VOCAB, HIDDEN, BLOCK = 49152, 576, 8
CHECKED = 64
REPEATS = 10


def milliseconds(call) -> float:  # noqa: ANN001
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return means.median(times[2:])


def errors(logits: torch.Tensor, known: torch.Tensor, ids: torch.Tensor) -> tuple[float, float]:
    """Of the kernels against the readable form on a CPU: the largest of the terms, and of the
    gradient's entries relative to its row's largest."""
    by = Terms(*torch.randn(3, len(ids)))
    plain = [some.cpu() for some in (logits, known, ids)]
    wanted = statistics(*plain)
    slope = gradient(plain[0].float(), *plain[1:], wanted, by)
    found = statistics(logits, known, ids)
    got = gradient(logits, known, ids, found, Terms(*(row.cuda() for row in vars(by).values())))
    pairs = zip(vars(found.terms).values(), vars(wanted.terms).values())
    of_terms = max(float((row.cpu() - plain_row).abs().max()) for row, plain_row in pairs)
    off = (got.float().cpu() - slope).abs().amax(-1) / slope.abs().amax(-1)
    return of_terms, float(off.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    rows = parser.parse_args().rows
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB, bias=False, device="cuda", dtype=torch.bfloat16)
    head.requires_grad_(False).weight.normal_(std=0.1)
    known = 1.5 * torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    hidden = (known + torch.randn_like(known)).float().requires_grad_()
    ids = torch.randint(VOCAB, (rows,), device="cuda")
    ids[: rows // 2] = (known[: rows // 2] @ head.weight.T).argmax(-1)
    weights = torch.full((rows,), 1.0 / rows, device="cuda")
    labelled = torch.ones(rows // BLOCK, BLOCK, dtype=torch.bool, device="cuda")

    def entropy() -> torch.Tensor:
        return cross_entropy(hidden, weights, head, Heads(known))

    print(f"{'cross-entropy':16}{milliseconds(entropy):8.2f} ms")
    for kind in LOSSES:
        value = acceptance_value(kind, 1.0, weights, labelled)

        def loss(value=value) -> torch.Tensor:  # noqa: ANN001
            return terms_loss(hidden, head, known, ids, BLOCK, value)

        print(f"{kind:16}{milliseconds(loss):8.2f} ms")
    print(f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB at most")
    some = slice(rows // 2 - CHECKED // 2, rows // 2 + CHECKED // 2)
    logits, targets = (head_logits(states[some].detach(), head) for states in (hidden, known))
    of_terms, of_gradient = errors(logits, targets, ids[some])
    print(f"largest errors: of the terms {of_terms:.1e}, of the gradient {of_gradient:.1e}")


if __name__ == "__main__":
    main()
