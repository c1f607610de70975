"""Whether a prompt was in the training data: shared n-grams of tokens.

The user's words alone are compared (a chat template is in every conversation), with whole
conversations of the data. n-grams are 64-bit polynomial hashes; a false hit needs a collision.
"""

from __future__ import annotations

import numpy as np

from train.token_file import TokenFiles

LENGTH = 8
_BASE = np.uint64(0x9E3779B97F4A7C15)


def ngrams(tokens: np.ndarray, length: int = LENGTH) -> np.ndarray:
    """Hashes `(max(0, n - length + 1),)` uint64 of the n-grams of `tokens (n,)`."""
    count = max(0, len(tokens) - length + 1)
    values = np.zeros(count, np.uint64)
    words = tokens.astype(np.uint64) + np.uint64(1)
    for offset in range(length):
        values = values * _BASE + words[offset : offset + count]
    return values


def seen_shares(prompts: list[list[int]], files: TokenFiles) -> list[float]:
    """The share of each prompt's n-grams that occur in the data.

    A prompt shorter than `LENGTH` is one n-gram of its own length.
    """
    lengths = [min(LENGTH, len(prompt)) for prompt in prompts]
    shares = [0.0] * len(prompts)
    for length in sorted(set(lengths)):
        known = [ngrams(files[index].tokens, length) for index in range(len(files))]
        table = np.unique(np.concatenate(known))
        for index, prompt in enumerate(prompts):
            if lengths[index] == length and prompt and len(table):
                grams = ngrams(np.array(prompt), length)
                place = np.searchsorted(table, grams).clip(max=len(table) - 1)
                shares[index] = float((table[place] == grams).mean())
    return shares
