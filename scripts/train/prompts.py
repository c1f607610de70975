"""Prompts to be answered: a user's files, or user turns that the chat model writes itself.

From files: every line of a `.jsonl` is an object with `"prompt"` (a text), `"messages"` (a chat) or
`"text"`; any other file is one prompt a line. Texts become the user turn of the chat template, or
stay as they are for a target without one.

Self-synthesised (Magpie, arXiv:2406.08464): an instruct model that is given its chat template up to
where the user's words begin continues with a user turn. Left alone, it writes what it was tuned on;
an opening from `OPENINGS` steers it to a domain, and is part of the turn.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fork.errors import ForkError

HELD_OUT = Path(__file__).with_name("heldout.jsonl")
"""Prompts to measure drafts on; no training data."""

OPENINGS: dict[str, tuple[str, ...]] = {
    "chat": (
        *("", "", "", "", "How do I", "What is the", "Explain", "Why do", "Give me advice on"),
        *("Write a short story about", "Summarize", "Rewrite", "What should I", "Describe"),
    ),
    "code": (
        *("Write a Python function that", "Write a JavaScript function to", "Fix this code:"),
        *("Write a SQL query that", "Explain this code:\n```python\n", "Write a C program that"),
        *("Write a class in Python that", "Write a bash script that"),
    ),
    "math": (
        *("Solve", "Calculate", "If a train", "What is the sum of", "Find the value of x if"),
        *("A shop sells", "How many", "Prove that"),
    ),
    "copying": (
        *("Repeat the following text exactly:", "Correct the spelling:", "Extract the names from"),
        *("Copy this list:", "Translate this into JSON:", "Put this text in bullet points:"),
    ),
    "multilingual": (
        *("¿Cómo", "Qu'est-ce que", "Was ist", "Translate into French:", "Translate into Spanish:"),
        *("Scrivi", "Explique", "Erkläre"),
    ),
}
_MARK = "\x02words\x03"


@dataclass(frozen=True)
class Prompt:
    """`ids` of a prompt, ready for the target to answer."""

    ids: list[int]
    domain: str


class ChatTemplate:
    """A chat template split around the user's words."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises ForkError when the template does not show the user's words as they are."""
        self._tokenizer = tokenizer
        self.known = bool(getattr(tokenizer, "chat_template", None))
        if not self.known:
            return
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        if text.count(_MARK) != 1:
            raise ForkError(
                "the target's chat template changes the user's words: pass prompts in --prompts "
                "as they are to be continued, with --raw."
            )
        before, after = text.split(_MARK)
        self.before, self.after = self._encode(before), self._encode(after)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def user_turn(self, text: str) -> list[int]:
        """Ids of a conversation whose user says `text`, up to where the answer begins."""
        if not self.known:
            return self._tokenizer.encode(text)
        return self.before + self._encode(text) + self.after

    def opening(self, text: str) -> list[int]:
        """Ids of the template up to the user's words, and the first of them.

        Raises ForkError for a target without a chat template, which writes no user turns.
        """
        if not self.known:
            raise ForkError(
                "the target has no chat template to write prompts from: pass --prompts FILE."
            )
        return self.before + self._encode(text)


def read_prompts(paths: list[Path], tokenizer: Any, *, raw: bool = False) -> list[Prompt]:
    """The prompts in `paths`; `raw` ones are tokenized as they are, without the chat template.

    Raises ForkError for a file that cannot be read, is empty or has a line of another kind.
    """
    template = ChatTemplate(tokenizer)
    prompts = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ForkError(f"--prompts {path} cannot be read ({error}): give a text.") from None
        before = len(prompts)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            words: Any = {"text": line}
            if path.suffix == ".jsonl":
                words = _json_line(line, f"{path}:{number}")
            ids = _ids(words, template, tokenizer, raw, f"{path}:{number}")
            if ids:
                prompts.append(Prompt(ids, str(words.get("domain", path.stem))))
        if len(prompts) == before:
            raise ForkError(f"--prompts {path} has no prompts: give a file with one a line.")
    return prompts


def first_of_each_domain(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of every domain, in their order."""
    found: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        found[prompt.domain] += 1
        if found[prompt.domain] <= count:
            chosen.append(prompt)
    return chosen


def _json_line(line: str, where: str) -> dict[str, Any]:
    try:
        words = json.loads(line)
    except ValueError as error:
        raise ForkError(f"--prompts {where} is no JSON ({error}): correct that line.") from None
    if not isinstance(words, dict) or not words.keys() & {"prompt", "messages", "text"}:
        raise ForkError(
            f'--prompts {where} has none of "prompt", "messages", "text": correct that line.'
        )
    return words


def _ids(words: dict, template: ChatTemplate, tokenizer: Any, raw: bool, where: str) -> list[int]:
    if "messages" in words:
        try:
            text = tokenizer.apply_chat_template(
                words["messages"], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever a template raises
            raise ForkError(
                f"--prompts {where}: the chat template refuses the messages ({error}): "
                "correct that line."
            ) from None
        return tokenizer.encode(text, add_special_tokens=False)
    text = words["prompt"] if "prompt" in words else words["text"]
    if not isinstance(text, str):
        raise ForkError(f"--prompts {where}: the prompt is no text: correct that line.")
    return tokenizer.encode(text) if raw else template.user_turn(text)


def save_prompts(path: Path, prompts: list[Prompt]) -> None:
    """Writes `prompts` at once: the file is there whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        for prompt in prompts:
            file.write(json.dumps({"prompt": prompt.ids, "domain": prompt.domain}) + "\n")
    partial.replace(path)


def load_prompts(path: Path) -> list[Prompt]:
    """Raises ForkError when the file is not one that `save_prompts` wrote."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [Prompt(line["prompt"], line["domain"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        raise ForkError(f"{path} is broken: delete it and run make_data.py again.") from None
