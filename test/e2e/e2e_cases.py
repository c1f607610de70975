"""What the end-to-end tests say to servers: prompts, reference answers, how FLASHMAP is started."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from drafts.folders import PACKAGE, whole_block
from drafts.replay import Corruption, Reference, Shape, predicted_accepts
from e2e_prompts import LONG, RAW
from serving import Server

BLOCK_SIZE = 16
CHAIN = Shape(BLOCK_SIZE, BLOCK_SIZE + 1)
NUM_TOKENS = 128
# Block starts are rejected now and then, long blocks pass now and then.
CORRUPTION = Corruption((0.2, 0.08), seed=1)
FLOAT32 = ("--dtype", "float32", "--random-seed", "0")
TEST_FOLDER = Path(__file__).resolve().parents[1]
END = 2  # <|im_end|>
# Both cores, but no spinning at barriers: that makes a server ten times slower on busy cores.
ENVIRONMENT: dict[str, str | None] = {"OMP_NUM_THREADS": None, "OMP_WAIT_POLICY": "passive"}


def flashmap_server(target: Path, draft: Path, *args: object, **options: Any) -> Server:
    """A server of `target` with the draft folder `draft`, which may be one of `test/drafts`."""
    server = Server(
        "--model-path", target,
        *FLOAT32,
        "--speculative-algorithm", "FLASHMAP",
        "--speculative-draft-model-path", draft,
        *whole_block(draft, args),
        *args,
        env=ENVIRONMENT,
        **options,
    )  # fmt: skip
    server.env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = PACKAGE
    server.env["PYTHONPATH"] += f":{TEST_FOLDER}"
    return server


@dataclass(frozen=True)
class Case:
    """A prompt and how the server without speculation continues it greedily."""

    text: str
    prompt: list[int]
    completion: list[int]

    @property
    def reference(self) -> Reference:
        return Reference(tuple(self.prompt), tuple(self.completion))

    def until(self, stop_token: int) -> list[int]:
        """The completion with its end, or as many tokens as the tests ask for without one."""
        tokens = self.completion[:NUM_TOKENS]
        return tokens[: tokens.index(stop_token) + 1] if stop_token in tokens else tokens

    def accepts(self, num_tokens: int, shape: Shape = CHAIN) -> list[int]:
        """Drafts that an oracle of `CORRUPTION` gets accepted in each step."""
        return predicted_accepts(self.reference, CORRUPTION, shape=shape, num_tokens=num_tokens)


def histogram(accepts: Sequence[int]) -> list[int]:
    """Steps by accepted drafts, as a server's `spec_correct_drafts_histogram`."""
    return [list(accepts).count(length) for length in range(max(accepts, default=-1) + 1)]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """`text` as the tests send it: raw, or as a user's turn of a chat."""
    if text in (*RAW, LONG):
        return tokenizer(text).input_ids
    turn = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)


_BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "rare"]}, "maxItems": 2},
    },
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}
_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<sold>",
        "content": {"type": "json_schema", "json_schema": {"enum": ["few", "many", "none"]}},
        "end": "</sold>",
    },
}
GRAMMARS = {
    "json": dict(json_schema=json.dumps(_BOOK)),
    "regex": dict(regex=r"[A-Z][a-z]{2,8} [0-9]{4}-[0-9]{2}"),
    "ebnf": dict(ebnf='root ::= ("yes" | "no") ", " [a-z] [a-z] [a-z] [a-z] [a-z] "!"'),
    "tag": dict(structural_tag=json.dumps(_TAG)),
}


def check_grammar(name: str, text: str) -> None:
    """Whether `text` is what `GRAMMARS[name]` allows."""
    if name == "json":
        book = json.loads(text)
        assert set(book) == {"title", "year", "tags"}
        assert 1900 <= book["year"] <= 2030 and set(book["tags"]) <= {"new", "old", "rare"}
    elif name == "regex":
        assert re.fullmatch(GRAMMARS[name]["regex"], text)
    elif name == "tag":
        assert re.fullmatch(r'<sold>"(few|many|none)"</sold>', text)
    else:
        assert re.fullmatch(r"(yes|no), [a-z]{5}!", text)


def flush_cache(server: Server) -> None:
    """Empty the radix cache of an idle server."""
    with urllib.request.urlopen(f"{server.url}/flush_cache?timeout=30", data=b"") as response:
        assert response.status == 200


def used_tokens(server: Server) -> int:
    """Slots of the KV pool that running requests hold; cached prefixes do not count."""
    (load,) = server.request("/v1/loads")["loads"]
    return load["num_used_tokens"]


def assert_pool_is_free(server: Server) -> None:
    """No request holds a slot, and the server's own leak check found nothing when it was idle."""
    deadline = time.monotonic() + 30
    while used_tokens(server) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert used_tokens(server) == 0
    assert "leak detected" not in server.log()
