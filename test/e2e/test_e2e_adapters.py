"""LoRA adapters of the target, and prompts prefilled in chunks beside running requests.

One server does both, under overlap scheduling, which a CPU server otherwise switches off. Its draft
is shared by all adapters and knows nothing of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts.folders import write_oracle
from drafts.replay import Corruption, Reference
from e2e_cases import FLOAT32, assert_pool_is_free, flashmap_server
from safetensors.torch import save_file
from serving import Server, with_habits
from tiny_model import SIZES, write_tiny_model

NUM_TOKENS = 60
BLOCK = 16
RANK = 4
CHUNK = 32
ADAPTERS = (None, "north", "south")
HIDDEN = SIZES["hidden_size"]
# Outputs and inputs of the layers that are adapted.
LAYERS = {
    "self_attn.q_proj": (64, HIDDEN),
    "self_attn.v_proj": (32, HIDDEN),
    "mlp.down_proj": (HIDDEN, SIZES["intermediate_size"]),
}
PENALTIES = dict(frequency_penalty=0.6, presence_penalty=0.4, min_new_tokens=50)
# No token is allowed after itself; longer than any answer.
GRAMMAR = dict(regex="([a-f][0-9]){40}")


@dataclass(frozen=True)
class Case:
    """A request and its greedy answer without speculation."""

    prompt: list[int]
    adapter: str | None
    output: list[int]


def write_adapter(folder: Path, seed: int) -> Path:
    """A PEFT folder of random weights that change the target's text."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, (outputs, inputs) in LAYERS.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / 4
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=RANK,
        lora_dropout=0.0,
        bias="none",
        target_modules=[name.rpartition(".")[2] for name in LAYERS],
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def params(**more: Any) -> dict[str, Any]:
    return dict(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True) | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `target`, `untrained` and the adapters."""
    from make_draft import main as make_draft

    root = tmp_path_factory.mktemp("adapters")
    write_tiny_model(root / "target", seed=4)
    sizes = ("--block-size", BLOCK, "--hidden-size", 64, "--layers", 1)
    arguments = ("--target", root / "target", "--output", root / "untrained", *sizes)
    assert not make_draft([str(a) for a in arguments])
    for seed, name in enumerate(ADAPTERS[1:]):
        write_adapter(root / name, seed)
    return root


@pytest.fixture(scope="module")
def flags(folder: Path) -> tuple[object, ...]:
    paths = [f"{name}={folder / name}" for name in ADAPTERS[1:]]
    return ("--lora-paths", *paths, "--lora-backend", "torch_native", "--max-total-tokens", 8192)


@pytest.fixture(scope="module")
def cases(folder: Path, flags: tuple[object, ...]) -> dict[str, list[Case]]:
    """By kind: `adapted`, each prompt with each adapter; the others without one."""
    rng = random.Random(0)
    prompts = [rng.choices(range(1, 95), k=rng.randint(3, 12)) for _ in range(4)]
    long = [rng.choices(range(1, 95), k=rng.randint(400, 500)) for _ in range(2)]
    args = ("--model-path", folder / "target", *FLOAT32, *flags, "--disable-overlap-schedule")

    def answers(server: Server, asked: list[tuple[list[int], str | None]], **more: Any) -> Any:
        found = server.request("/generate", payload(asked, params(**more)))
        return [Case(prompt, name, a["output_ids"]) for (prompt, name), a in zip(asked, found)]

    with with_habits(Server(*args), "pin") as plain:
        adapted = [(prompt, name) for prompt in prompts for name in ADAPTERS]
        return dict(
            adapted=answers(plain, adapted),
            penalized=answers(plain, [(prompt, None) for prompt in prompts], **PENALTIES),
            constrained=answers(plain, [(prompt, None) for prompt in prompts], **GRAMMAR),
            long=answers(plain, [(prompt, None) for prompt in long]),
        )


def payload(asked: list[tuple[list[int], str | None]], sampling: Any) -> dict[str, Any]:
    return dict(
        input_ids=[prompt for prompt, _ in asked],
        lora_path=[name for _, name in asked],
        sampling_params=sampling,
    )


@pytest.fixture(scope="module", params=[0, 4], ids=["chains", "trees"])
def server(
    request: pytest.FixtureRequest,
    folder: Path,
    flags: tuple[object, ...],
    cases: dict[str, list[Case]],
) -> Iterator[Server]:
    found = [case for kind in cases.values() for case in kind]
    references = [Reference(tuple(case.prompt), tuple(case.output)) for case in found]
    corruption = Corruption((0.1, 0.05), seed=1)
    draft = write_oracle(
        folder / f"oracle-{request.param}", folder / "untrained", references, corruption
    )
    chunks = ("--enable-mixed-chunk", "--chunked-prefill-size", CHUNK)
    trees = ("--speculative-flashmap-tree-candidates", request.param)
    running = flashmap_server(folder / "target", draft, *flags, *chunks, *trees)
    with with_habits(running, "overlap", "pin") as started:
        yield started


def test_adapters_and_the_base_in_one_batch(server: Server, cases: dict[str, list[Case]]) -> None:
    adapted = cases["adapted"]
    for first in range(0, len(adapted), len(ADAPTERS)):
        outputs = {tuple(case.output[:8]) for case in adapted[first : first + len(ADAPTERS)]}
        assert len(outputs) == len(ADAPTERS), "an adapter changes nothing"
    asked = [(case.prompt, case.adapter) for case in adapted]
    answers = server.request("/generate", payload(asked, params()))
    for case, answer in zip(adapted, answers):
        assert answer["output_ids"] == case.output, case.adapter
        assert answer["meta_info"]["spec_verify_ct"] < NUM_TOKENS / 2, case.adapter
    assert_pool_is_free(server)


def test_prompts_in_chunks_beside_running_requests(
    server: Server, cases: dict[str, list[Case]]
) -> None:
    """Requests go on while long prompts are prefilled, token by token, and answer as alone."""
    running = [(case, {}) for case in cases["adapted"][:6]]
    running += [(case, PENALTIES) for case in cases["penalized"]]
    running += [(case, GRAMMAR) for case in cases["constrained"]]
    # They are prefilled in this order, if the grammar need not be compiled first.
    server.generate(cases["constrained"][0].prompt, **params(**GRAMMAR))
    kinds = running + [(case, {}) for case in cases["long"]]
    asked = [(case.prompt, case.adapter) for case, _ in kinds]
    sampling = [params(**more) for _, more in kinds]
    answers = server.request("/generate", payload(asked, sampling))
    for (case, more), answer in zip(kinds, answers):
        assert answer["output_ids"] == case.output, (case, more)
    # What neither a prefill nor a verify step gave came from mixed chunks.
    metas = [answer["meta_info"] for answer in answers[: len(running)]]
    mixed = [
        NUM_TOKENS - 1 - meta["spec_verify_ct"] - meta["spec_num_correct_drafts"] for meta in metas
    ]
    assert min(mixed) > 5, "no request ran beside a prefill"
    assert_pool_is_free(server)
