"""Random streams of a training step.

Every draw is a function of (seed, step, rank, purpose): a resumed run repeats an unbroken one
without saving generator states, and a state that is too large to keep is drawn again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draws:
    """The streams of one step on one rank."""

    seed: int
    step: int
    rank: int = 0

    def generator(self, device: torch.device | str, *purpose: str | int) -> torch.Generator:
        """A generator of its own for each `purpose`."""
        text = repr((self.seed, self.step, self.rank, *purpose))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)

    def uniform(self, shape: tuple[int, ...], *purpose: str | int) -> torch.Tensor:
        """In [0, 1), float32, on the CPU: what a host decides with."""
        return torch.rand(shape, generator=self.generator("cpu", *purpose))
