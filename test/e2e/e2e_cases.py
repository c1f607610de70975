"""What the end-to-end tests say to servers: prompts, reference answers, how FLASHMAP is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_prompts import LONG, RAW
from serving import Server

from drafts.folders import PACKAGE
from drafts.replay import Corruption, Reference

BLOCK_SIZE = 16
NUM_TOKENS = 128
# Block starts are rejected now and then, long blocks pass now and then.
CORRUPTION = Corruption((0.2, 0.08), seed=1)
FLOAT32 = ("--dtype", "float32", "--random-seed", "0")
TEST_FOLDER = Path(__file__).resolve().parents[1]
# OpenMP threads that spin while they wait make a server ten times slower on busy cores.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


def flashmap_server(target: Path, draft: Path, *args: object, **options: Any) -> Server:
    """A server of `target` with the draft folder `draft`, drafts of this repository's tests allowed."""
    server = Server(
        "--model-path", target,
        *FLOAT32,
        "--speculative-algorithm", "FLASHMAP",
        "--speculative-draft-model-path", draft,
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

    prompt: tuple[int, ...]
    answer: dict[str, Any]

    @property
    def reference(self) -> Reference:
        return Reference(self.prompt, tuple(self.answer["output_ids"]))


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """`text` as the tests send it: raw, or as a user's turn of a chat."""
    if text in RAW or text == LONG:
        return tokenizer(text).input_ids
    turn = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
