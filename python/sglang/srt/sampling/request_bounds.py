"""Bounds of what one request may ask for; beyond them it would end or stall the server.

Samples are copies of the request, made before it is queued. The likeliest tokens of a position
cannot be more than the vocabulary has: ``topk`` raises in the scheduler, which ends the server.
"""

from __future__ import annotations

from typing import Any

MAX_SAMPLES = 16384


def num_samples(asked: Any) -> int:
    """The samples ``n`` of a request, 1 if it names none; ``ValueError`` if out of bounds."""
    number = 1 if asked is None else asked
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_SAMPLES:
        raise ValueError(
            f"n, the number of samples, must be from 1 to {MAX_SAMPLES}, got {asked!r}."
        )
    return number


def check_top_logprobs(asked: int | None, vocab_size: int) -> None:
    """``ValueError`` unless the vocabulary has as many tokens as are ``asked`` for at a
    position."""
    if not 0 <= (asked or 0) <= vocab_size:
        raise ValueError(
            f"The request asks for the {asked} likeliest tokens, but there are {vocab_size}; ask "
            "for as many at most."
        )
