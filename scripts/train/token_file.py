"""Conversations as tokens on disk, appended to and memory-mapped.

A data folder holds
    meta.json       format, target, vocab_size, tokenizer (sha256 of its vocabulary), dtype
    tokens.bin      all tokens one after the other, uint16 or uint32, little endian
    sequences.bin   one row of 4 int64 a conversation: start, prompt length, length (in tokens),
                    temperature in thousandths
    prompts.jsonl   {"prompt": ids, "domain": …} a line (`prompts.py`); row i answers line i

Tokens are synced to disk before the rows that name them, so a killed writer leaves at most tokens
that no row names, which the next writer cuts off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fork.errors import ForkError

_FORMAT = 1
_ROW = 4


@dataclass(frozen=True)
class Meta:
    """What a data folder is made of."""

    target: str
    vocab_size: int
    tokenizer: str
    dtype: str
    format: int = _FORMAT

    @classmethod
    def of(cls, target: str, vocab_size: int, tokenizer: Any) -> Meta:
        dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        return cls(target, vocab_size, fingerprint(tokenizer), dtype)


@dataclass(frozen=True)
class Sequence:
    """One conversation: `tokens (length,)` int64, of which the first `prompt_length` were given."""

    tokens: np.ndarray
    prompt_length: int
    temperature: float


def fingerprint(tokenizer: Any) -> str:
    """sha256 of a tokenizer's vocabulary: equal for tokenizers that number tokens alike."""
    text = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _again(folder: Path, fault: str) -> ForkError:
    return ForkError(f"the data folder {folder} {fault}: make it again with scripts/make_data.py.")


def read_meta(folder: Path) -> Meta:
    """Raises ForkError when `folder` is no data folder."""
    try:
        return _known(Meta(**json.loads((folder / "meta.json").read_text())))
    except (OSError, ValueError, TypeError):
        raise _again(folder, "has no readable meta.json") from None


def _known(meta: Meta) -> Meta:
    if meta.format != _FORMAT or meta.dtype not in ("uint16", "uint32"):
        raise ValueError
    return meta


class TokenWriter:
    """Appends conversations to a data folder, made on first use."""

    def __init__(self, folder: Path, meta: Meta) -> None:
        """Raises ForkError when `folder` holds data of another target or tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "meta.json"
        if path.exists():
            if read_meta(folder) != meta:
                raise ForkError(
                    f"the data folder {folder} was made with another target or tokenizer "
                    f"({read_meta(folder).target}, not {meta.target}): choose another --output."
                )
        else:
            path.write_text(json.dumps(asdict(meta), indent=2) + "\n")
        self._dtype = np.dtype(meta.dtype).newbyteorder("<")
        self._tokens = open(folder / "tokens.bin", "ab")  # noqa: SIM115
        self._rows = open(folder / "sequences.bin", "ab")  # noqa: SIM115
        self._cut_to_rows(folder)

    def _cut_to_rows(self, folder: Path) -> None:
        row = _ROW * 8
        self.count = self._rows.tell() // row
        self._rows.truncate(self.count * row)
        rows = np.fromfile(folder / "sequences.bin", "<i8").reshape(-1, _ROW)
        self._end = int(rows[-1, 0] + rows[-1, 2]) if len(rows) else 0
        if self._tokens.tell() < self._end * self._dtype.itemsize:
            raise _again(folder, "is truncated (tokens.bin is shorter than sequences.bin says)")
        self._tokens.truncate(self._end * self._dtype.itemsize)
        self._tokens.seek(0, os.SEEK_END)
        self._rows.seek(0, os.SEEK_END)

    def append(self, sequences: Iterable[Sequence]) -> None:
        """Writes conversations durably, all or (when killed) a part of them from the first on."""
        rows = []
        for sequence in sequences:
            length = len(sequence.tokens)
            self._tokens.write(sequence.tokens.astype(self._dtype).tobytes())
            rows.append(
                [self._end, sequence.prompt_length, length, round(1000 * sequence.temperature)]
            )
            self._end += length
        _sync(self._tokens)
        self._rows.write(np.array(rows, "<i8").tobytes())
        _sync(self._rows)
        self.count += len(rows)

    def close(self) -> None:
        self._tokens.close()
        self._rows.close()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


class TokenFiles:
    """The conversations of one or more data folders, memory-mapped."""

    def __init__(self, folders: list[Path]) -> None:
        """Raises ForkError for folders that are broken, empty or of different targets."""
        self.meta = read_meta(folders[0])
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        for folder in folders:
            if read_meta(folder) != self.meta:
                raise ForkError(
                    f"the data folders {folders[0]} and {folder} were made with different targets "
                    "or tokenizers: train on those of one target."
                )
            self._parts.append(_map(folder, self.meta))
        self._starts = np.cumsum([0] + [len(rows) for _, rows in self._parts])
        if not len(self):
            raise _again(folders[0], "is empty")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Sequence:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        tokens, rows = self._parts[part]
        start, prompt, length, thousandths = rows[index - self._starts[part]].tolist()
        return Sequence(
            tokens[start : start + length].astype(np.int64), prompt, thousandths / 1000
        )

    def lengths(self) -> np.ndarray:
        """`(n,)` int64 tokens of each conversation."""
        return np.concatenate([rows[:, 2] for _, rows in self._parts])

    def prompt_lengths(self) -> np.ndarray:
        return np.concatenate([rows[:, 1] for _, rows in self._parts])

    def temperatures(self) -> np.ndarray:
        """`(n,)` float."""
        return np.concatenate([rows[:, 3] for _, rows in self._parts]) / 1000

    def answer_counts(self) -> np.ndarray:
        """`(V,)` int64: how often each token occurs in the answers."""
        counts = np.zeros(self.meta.vocab_size, np.int64)
        for index in range(len(self)):
            sequence = self[index]
            answer = sequence.tokens[sequence.prompt_length :]
            counts += np.bincount(answer, minlength=len(counts))
        return counts

    def check_tokenizer(self, tokenizer: Any, vocab_size: int, target: str) -> None:
        """Raises ForkError unless the data was made with this tokenizer."""
        if fingerprint(tokenizer) != self.meta.tokenizer or vocab_size != self.meta.vocab_size:
            raise ForkError(
                f"the data was made with the tokenizer of {self.meta.target}, and {target} has "
                "another: make data with this target (scripts/make_data.py)."
            )


def _map(folder: Path, meta: Meta) -> tuple[np.ndarray, np.ndarray]:
    dtype = np.dtype(meta.dtype).newbyteorder("<")
    try:
        rows = np.fromfile(folder / "sequences.bin", "<i8")
        if (folder / "sequences.bin").stat().st_size % (8 * _ROW):
            raise _again(folder, "has a truncated sequences.bin")
        rows = rows.reshape(-1, _ROW)
        size = (folder / "tokens.bin").stat().st_size // dtype.itemsize
        tokens = np.memmap(folder / "tokens.bin", dtype, "r") if size else np.zeros(0, dtype)
    except OSError:
        raise _again(folder, "lacks tokens.bin or sequences.bin") from None
    starts, prompts, lengths = rows[:, 0], rows[:, 1], rows[:, 2]
    if len(rows) and int((starts + lengths).max()) > size:
        raise _again(folder, "is truncated (tokens.bin is shorter than sequences.bin says)")
    if ((starts < 0) | (prompts < 1) | (prompts > lengths)).any():
        raise _again(folder, "has a corrupt sequences.bin")
    if size and int(tokens.max()) >= meta.vocab_size:
        raise _again(folder, "is corrupt (it has tokens outside the vocabulary)")
    return tokens, rows
