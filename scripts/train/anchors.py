"""Batches: conversations of similar length, anchors drawn in their answers.

A batch is a pure function of (data, seed, step, rank): resuming needs no reader state. In each
epoch conversations are shuffled, sorted by length inside pools of `_POOL` batches, cut into
batches, and those are shuffled. A conversation longer than `max_length` is cut there. Anchors are
drawn from the answer's first token, which a server's prefill samples, to the last but one; slots
past the end of a conversation have no label and weigh nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from fork.errors import ForkError

from train.token_file import TokenFiles

_POOL = 50
_LENGTH_STEP = 64
"""Padded lengths are multiples of this: few shapes to compile."""
_HELD_OUT = 25
"""One conversation in this many is kept for validation."""


@dataclass(frozen=True)
class Batch:
    """`tokens (B, S)` padded with 0, `anchors (B, A)`, and the blocks after them:
    `labels (B, A, K)` with -1 where the conversation has ended; `conversations (B,)`, their numbers
    in the data. int64."""

    tokens: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor
    conversations: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        fields = (self.tokens, self.anchors, self.labels, self.conversations)
        return Batch(*(field.to(device, non_blocking=True) for field in fields))


class BatchSource:
    """Training and validation batches of data files."""

    def __init__(
        self,
        files: TokenFiles,
        *,
        batch_size: int,
        anchors: int,
        block_size: int,
        max_length: int,
        seed: int,
    ) -> None:
        """Raises ForkError when the data has too few conversations for a batch."""
        self._files, self._seed = files, seed
        self._batch_size, self._anchors = batch_size, anchors
        self._block_size, self._max_length = block_size, max_length
        answers = files.lengths() - files.prompt_lengths()
        fits = (answers >= 2) & (files.prompt_lengths() + 2 <= max_length)
        usable = np.flatnonzero(fits)
        held = np.arange(len(usable)) % _HELD_OUT == _HELD_OUT - 1
        self._train, self.held_out = usable[~held], usable[held]
        self._lengths = files.lengths()
        if len(self._train) < batch_size:
            raise ForkError(
                f"the data has {len(self._train)} conversations to train on, fewer than a batch: "
                f"make more, or lower --batch-size {batch_size}."
            )

    @property
    def batches_per_epoch(self) -> int:
        return len(self._train) // self._batch_size

    @property
    def tokens(self) -> int:
        """Tokens in the conversations trained on."""
        return int(self._lengths[self._train].sum())

    def train_batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Batch `rank` of the `ranks` of a step."""
        epoch, index = divmod(step * ranks + rank, self.batches_per_epoch)
        random = np.random.default_rng([self._seed, 1, step, rank])
        return self._batch(self._epoch(epoch)[index], random)

    def _epoch(self, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch_made", None) == epoch:
            return self._epoch_batches
        random = np.random.default_rng([self._seed, 0, epoch])
        order = random.permutation(self._train)
        order = order[: self.batches_per_epoch * self._batch_size]
        pool = _POOL * self._batch_size
        pieces = [order[i : i + pool] for i in range(0, len(order), pool)]
        order = np.concatenate([p[np.argsort(self._lengths[p], kind="stable")] for p in pieces])
        batches = order.reshape(-1, self._batch_size)
        self._epoch_made = epoch
        self._epoch_batches = batches[random.permutation(len(batches))]
        return self._epoch_batches

    def held_out_batches(self, most: int, temperature: float | None = None) -> list[Batch]:
        """The same batches every time, at most `most`; of one temperature where asked."""
        chosen = self.held_out
        if temperature is not None:
            chosen = chosen[self._files.temperatures()[chosen] == temperature]
        chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        starts = range(0, len(chosen), self._batch_size)
        pieces = [chosen[i : i + self._batch_size] for i in starts]
        if len(pieces) > most:
            pieces = [pieces[i] for i in np.linspace(0, len(pieces) - 1, most).round().astype(int)]
        random = np.random.default_rng([self._seed, 2])
        return [self._batch(piece, random) for piece in pieces]

    def _batch(self, indices: np.ndarray, random: np.random.Generator) -> Batch:
        sequences = [self._files[int(index)] for index in indices]
        ends = [min(len(sequence.tokens), self._max_length) for sequence in sequences]
        width = -(-max(ends) // _LENGTH_STEP) * _LENGTH_STEP
        tokens = np.zeros((len(sequences), width), np.int64)
        anchors = np.empty((len(sequences), self._anchors), np.int64)
        labels = np.full((len(sequences), self._anchors, self._block_size), -1, np.int64)
        for row, (sequence, end) in enumerate(zip(sequences, ends)):
            tokens[row, :end] = sequence.tokens[:end]
            first, last = sequence.prompt_length, end - 2
            anchors[row] = _spread(random, first, last, self._anchors)
            slots = anchors[row][:, None] + 1 + np.arange(self._block_size)
            inside = slots < end
            labels[row][inside] = sequence.tokens[slots[inside]]
        return Batch(*map(torch.from_numpy, (tokens, anchors, labels, indices.astype(np.int64))))


def _spread(random: np.random.Generator, first: int, last: int, count: int) -> np.ndarray:
    """`count` positions in `[first, last]`, distinct while there are enough."""
    places = np.arange(first, last + 1)
    if len(places) >= count:
        return np.sort(random.choice(places, count, replace=False))
    return np.sort(np.concatenate([places, random.choice(places, count - len(places))]))
