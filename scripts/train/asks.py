"""Prompts as people write them: `asks.json`, templates with fields, filled at random.

A chat model that writes its own user turns (`prompts.py`) wanders off; a draft trained on the
answers to those is accepted less on what is really asked. Here a prompt is a template of its domain
in which every `{name}` is replaced by one of the fillers of that name, which may hold fields again,
`{name^}` by the same with a capital, `{2-99}` by a whole number from 2 to 99, and `{name+3-6}` by 3
to 6 different fillers with commas. Fields of one name are drawn independently.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from fork.errors import ForkError

ASKS = Path(__file__).with_name("asks.json")
_FIELD = re.compile(r"\{([a-z_]*)(\^?)\+?(?:(\d+)-(\d+))?\}")


class Asks:
    """Templates by domain and fillers by name."""

    def __init__(self, path: Path = ASKS, seed: int = 0) -> None:
        """Raises ForkError for a file of another form, or with a field that nothing fills."""
        try:
            words = json.loads(path.read_text(encoding="utf-8"))
            self._fillers: dict[str, list[str]] = words["fillers"]
            self.domains: dict[str, list[str]] = words["domains"]
            texts = [*_texts(self._fillers), *_texts(self.domains)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForkError(
                f"--asks {path} cannot be read ({error!r}): give JSON with domains and fillers, "
                "lists of texts by name."
            ) from None
        for text in texts:
            for name, _, low, high in _FIELD.findall(text):
                enough = not low or int(low) <= int(high) <= len(self._fillers.get(name, ()))
                if name and not (self._fillers.get(name) and enough):
                    raise ForkError(f"--asks {path} has too few fillers of {{{name}}}: add some.")
        self._random = random.Random(seed)

    def draw(self, domain: str) -> str:
        """One prompt of `domain`."""
        return self._fill(self._random.choice(self.domains[domain]))

    def _fill(self, text: str) -> str:
        return _FIELD.sub(lambda match: self._one(*match.groups()), text)

    def _one(self, name: str, capital: str, low: str | None, high: str | None) -> str:
        if not name:
            return str(self._random.randint(int(low), int(high)))
        fillers = self._fillers[name]
        if low is not None:
            count = self._random.randint(int(low), int(high))
            return ", ".join(map(self._fill, self._random.sample(fillers, count)))
        word = self._fill(self._random.choice(fillers))
        return word[0].upper() + word[1:] if capital else word


def _texts(words: dict[str, list[str]]) -> Iterator[str]:
    for texts in words.values():
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise TypeError("no list of texts")
        yield from texts


def different_asks(asks: Asks, count: int, banned: set[str]) -> Iterator[tuple[str, str]]:
    """`count` pairs of prompt and domain, domains in turn, none twice and none of `banned`
    (compared without case and spaces at the ends).

    A domain whose templates are used up is left out; there may be fewer than `count`.
    """
    seen, given = {text.strip().lower() for text in banned}, 0
    domains, misses = list(asks.domains), dict.fromkeys(asks.domains, 0)
    while given < count and domains:
        for domain in list(domains):
            text = asks.draw(domain)
            key = text.strip().lower()
            if key in seen:
                misses[domain] += 1
                if misses[domain] > 1000:
                    domains.remove(domain)
                continue
            misses[domain] = 0
            seen.add(key)
            yield text, domain
            given += 1
            if given == count:
                return
