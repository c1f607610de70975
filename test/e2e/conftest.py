"""Targets, drafts, reference answers and servers that the end-to-end tests share.

Starting a server costs more than most tests, so tests are grouped by the server they need. The
plain and the oracle server run for the whole session, others for one test file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from demo_target import demo_target
from drafts.folders import write_oracle
from drafts.replay import Reference
from e2e_cases import (
    BLOCK_SIZE,
    CORRUPTION,
    ENVIRONMENT,
    FLOAT32,
    GRAMMARS,
    NUM_TOKENS,
    Case,
    flashmap_server,
    prompt_ids,
)
from e2e_prompts import BOOK, EVERYDAY, LONG
from e2e_recorder import Package
from fork.checkout import here
from serving import Server


@pytest.fixture(scope="session")
def smollm() -> Path:
    """Folder of SmolLM2-135M-Instruct in float32."""
    return demo_target(here().cache, "float32")


@pytest.fixture(scope="session")
def tokenizer(smollm: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm)


@pytest.fixture(scope="session")
def untrained(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft for SmolLM2, a small one: what it drafts is rejected anyway."""
    from make_draft import main as make_draft  # imports the tree, which must have been built

    folder = tmp_path_factory.mktemp("drafts") / "untrained"
    sizes = ("--block-size", BLOCK_SIZE, "--hidden-size", 128, "--layers", 2)
    assert not make_draft([str(a) for a in ("--target", smollm, "--output", folder, *sizes)])
    return folder


@pytest.fixture(scope="session")
def plain(smollm: Path) -> Iterator[Server]:
    """The target without speculation."""
    args = ("--model-path", smollm, *FLOAT32, "--max-total-tokens", 16384)
    with Server(*args, env=ENVIRONMENT) as server:
        yield server


@pytest.fixture(scope="session")
def cases(plain: Server, tokenizer: Any) -> dict[str, Case]:
    """Everyday prompts and the long one by their text, continued past any end, in one batch.

    Longer than the tests ask for, by what the last block of an oracle can run over.
    """
    texts = (*EVERYDAY, LONG)
    prompts = [prompt_ids(tokenizer, text) for text in texts]
    answers = plain.generate(prompts, max_new_tokens=NUM_TOKENS + BLOCK_SIZE, ignore_eos=True)
    return {
        text: Case(text, prompt, answer["output_ids"])
        for text, prompt, answer in zip(texts, prompts, answers)
    }


@pytest.fixture(scope="session")
def constrained(plain: Server, tokenizer: Any) -> dict[str, Case]:
    """Answers to one prompt under each grammar, by its name."""
    prompt = prompt_ids(tokenizer, BOOK)
    params = [dict(temperature=0, max_new_tokens=100, **GRAMMARS[name]) for name in GRAMMARS]
    answers = plain.request(
        "/generate", dict(input_ids=[prompt] * len(params), sampling_params=params)
    )
    return {name: Case(name, prompt, a["output_ids"]) for name, a in zip(GRAMMARS, answers)}


@pytest.fixture(scope="session")
def references(cases: dict[str, Case], constrained: dict[str, Case]) -> list[Reference]:
    """What oracles replay."""
    found = [*cases.values(), *constrained.values()]
    # By these an oracle recognises a request at once.
    starts = [(len(case.prompt), case.completion[0]) for case in found]
    assert len(set(starts)) == len(starts), "change a prompt: two requests look alike at first"
    return [case.reference for case in found]


@pytest.fixture(scope="session")
def oracle(
    smollm: Path,
    untrained: Path,
    references: list[Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """FLASHMAP with all defaults and an oracle drafter of `CORRUPTION`."""
    folder = tmp_path_factory.mktemp("drafts") / "oracle"
    write_oracle(folder, untrained, references, CORRUPTION)
    # The benchmark client reads the average accept length, which is kept with the decode log.
    args = ("--max-total-tokens", 16384, "--decode-log-interval", 8)
    with flashmap_server(smollm, folder, *args) as server:
        yield server


@pytest.fixture(scope="session")
def package(smollm: Path, untrained: Path, references: list[Reference]) -> Package:
    from flashmap import FlashMapDraftModel
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    model = FlashMapDraftModel.from_pretrained(untrained, dtype=torch.float32).eval()
    return Package(target, model, references)
