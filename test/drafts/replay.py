"""What an oracle drafts: known continuations, recognised by their anchors and corrupted at will.

Nothing here needs the server, so that a test predicts every accept length with the same code.
Positions count from the first prompt token. An anchor at position `p` is drafted `K` slots, slot
`i` (from 0) being the token at position `p + 1 + i`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Sequence


@dataclass(frozen=True)
class Reference:
    """A prompt and how the target continues it, as token ids."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.completion


@dataclass(frozen=True)
class Corruption:
    """Slot `i` is drafted wrong with probability `probabilities[i]` (the last one goes on).

    Whether it is at a given anchor position is a fixed function of `(seed, position, slot)` and of
    the candidate block, each of which is wrong elsewhere.
    """

    probabilities: tuple[float, ...] = (0.0,)
    seed: int = 0

    def hits(self, position: int, slot: int, candidate: int = 0) -> bool:
        """Whether `slot` of a candidate block after an anchor at `position` is wrong."""
        key = f"{self.seed}:{position}:{slot}" + (f":{candidate}" if candidate else "")
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        uniform = int.from_bytes(digest, "little") / 2**64
        return uniform < self.probabilities[min(slot, len(self.probabilities) - 1)]


@dataclass(frozen=True)
class Shape:
    """What a server verifies: chains of `block_size` drafts, or trees of `width - 1` nodes out of
    `candidates` blocks."""

    block_size: int
    width: int
    candidates: int = 1

    def accepts(self, corruption: Corruption, anchor: int) -> int:
        """Drafts of the block after position `anchor` that greedy verification accepts.

        Nodes are prefixes of candidates; those that most candidates share are kept, the shorter
        first, then those of the first candidate. Wrong slots differ from candidate to candidate.
        """
        votes: dict[tuple, tuple[int, int]] = {}
        for candidate in range(self.candidates):
            prefix: tuple = ()
            for slot in range(self.block_size):
                wrong = corruption.hits(anchor, slot, candidate)
                prefix += (candidate if wrong else None,)
                count, first = votes.get(prefix, (0, candidate))
                votes[prefix] = (count + 1, first)
        order = sorted(votes, key=lambda p: (-votes[p][0], len(p), votes[p][1]))
        kept = set(order[: self.width - 1])
        return max((len(p) for p in kept if not any(x is not None for x in p)), default=0)


def predicted_accepts(
    reference: Reference, corruption: Corruption, *, shape: Shape, num_tokens: int
) -> list[int]:
    """Accepted drafts of each verify step until `num_tokens` tokens of the greedy completion exist.

    The first token comes from the prefill. `reference.completion` must be longer than `num_tokens`
    by the drafts of a step, since the last one may run past the end.
    """
    longest = min(shape.block_size, shape.width - 1)
    assert len(reference.completion) >= num_tokens + longest, "the reference is too short"
    accepts = []
    done = 1
    while done < num_tokens:
        accepts.append(shape.accepts(corruption, len(reference.prompt) + done - 1))
        done += accepts[-1] + 1
    return accepts


class Replay:
    """Follows which reference each `req_to_token` row is replaying.

    A step's anchor narrows the references that a row may be following. A row that matches none, or
    whose position went back or jumped, holds another request now and starts over.
    """

    def __init__(self, references: Sequence[Reference], *, longest_step: int) -> None:
        self._tokens = [reference.tokens for reference in references]
        self._starts = [len(reference.prompt) for reference in references]
        self._longest_step = longest_step
        self._rows: dict[int, tuple[int, list[int]]] = {}

    def match(self, row: int, position: int, anchor: int) -> int | None:
        """Index of the reference that `row` follows with this anchor; None if there is none."""
        last, followed = self._rows.get(row, (-1, []))
        candidates: list[int] = []
        if last < position <= last + self._longest_step:
            candidates = self._agreeing(followed, position, anchor)
        if not candidates:
            every = self._agreeing(range(len(self._tokens)), position, anchor)
            fresh = [index for index in every if self._starts[index] == position]
            candidates = fresh or every
        self._rows[row] = (position, candidates)
        return candidates[0] if candidates else None

    def continuation(self, reference: int | None, position: int, anchor: int) -> "Continuation":
        """What follows the anchor; beyond a reference, and without one, arbitrary token ids."""
        known = () if reference is None else self._tokens[reference]
        return Continuation(known[position + 1 :], anchor)

    def _agreeing(self, indices: Sequence[int] | range, position: int, anchor: int) -> list[int]:
        return [
            index
            for index in indices
            if position < len(self._tokens[index]) and self._tokens[index][position] == anchor
        ]


@dataclass(frozen=True)
class Continuation:
    """The tokens after an anchor."""

    known: tuple[int, ...]
    anchor: int

    def token(self, slot: int, vocab_size: int, *, corrupted: bool, candidate: int = 0) -> int:
        """Token id drafted at `slot`: the known one, or another than it when corrupted."""
        if slot >= len(self.known):
            return (self.anchor + slot + 1) % vocab_size
        offset = 1 + (slot + candidate + self.anchor) % (vocab_size - 1) if corrupted else 0
        return (self.known[slot] + offset) % vocab_size
