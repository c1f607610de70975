"""Servers on a machine without a GPU: no flags, no environment variables, and with speculation."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving import Server, ServerFailed
from tiny_model import SIZES, write_tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")

# Servers live for one class, so no two of them share the machine.
# The choice of the CPU must not need a variable. One thread: waiting threads slow each other.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": None, "OMP_NUM_THREADS": "1"}
PROMPTS = ["Hello", "The quick brown fox jumps over", "0 1 2 3 4 5", "x" * 300]
NEW_TOKENS = 40


class Reference:
    """Transformers on the same checkpoint, in float32."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    def greedy(self, prompt: str) -> list[int]:
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        output = self.model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return output[0, ids.shape[1] :].tolist()

    @torch.no_grad()
    def next_probs(self, ids: list[list[int]], temperature: float, top_k: int) -> torch.Tensor:
        logits = self.model(torch.tensor(ids)).logits[:, -1] / temperature
        kept = logits.topk(top_k)
        return torch.zeros_like(logits).scatter_(1, kept.indices, kept.values.softmax(-1))


def assert_greedy(server: Server, reference: Reference) -> None:
    expected = [reference.greedy(prompt) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 8  # the model says something
    options = dict(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    batch = server.generate(PROMPTS, **options)
    alone = [server.generate(prompt, temperature=1.0, top_k=1, **options) for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in batch] == expected
    assert [answer["output_ids"] for answer in alone] == expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="class")
def bare_server(llama: Path) -> Iterator[Server]:
    with Server("--model-path", llama, env=ENVIRONMENT) as server:
        yield server


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding window of 16 tokens and capped attention logits."""
    return write_tiny_model(tmp_path_factory.mktemp("gemma2"), "gemma2")


@pytest.fixture(scope="class")
def tree_server(gemma2: Path) -> Iterator[Server]:
    """The target drafts for itself: trees of six tokens, two branches a level."""
    arguments = ["--model-path", gemma2, "--speculative-draft-model-path", gemma2]
    arguments += ["--speculative-algorithm", "STANDALONE", "--speculative-num-steps", 3]
    arguments += ["--speculative-eagle-topk", 2, "--speculative-num-draft-tokens", 6]
    with Server(*arguments, env=ENVIRONMENT) as server:
        yield server


@pytest.fixture(scope="class")
def dspark_server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Upstream's block drafter with random weights: most of what it proposes is rejected."""
    folder = tmp_path_factory.mktemp("dspark")
    config = dict(
        SIZES,
        model_type="qwen3",
        architectures=["Qwen3DSparkModel"],
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        num_target_layers=2,
        target_layer_ids=[0],
        block_size=7,
        mask_token_id=300,
        markov_rank=8,
        markov_head_type="vanilla",
        dtype="float32",
    )
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ["--model-path", llama, "--speculative-draft-model-path", folder]
    arguments += ["--speculative-algorithm", "DSPARK", "--speculative-draft-load-format", "dummy"]
    with Server(*arguments, "--page-size", 16, env=ENVIRONMENT) as server:
        yield server


class TestBareServer:
    def test_idles(self, bare_server: Server) -> None:
        bare_server.generate("Hello", max_new_tokens=2)
        time.sleep(2)
        before, seconds = bare_server.cpu_seconds(), 4.0
        time.sleep(seconds)
        assert (bare_server.cpu_seconds() - before) / seconds < 0.2

    def test_resolves_to_the_cpu(self, bare_server: Server) -> None:
        info = bare_server.request("/server_info")
        assert (info["device"], info["attention_backend"]) == ("cpu", "torch_native")
        assert sum(process.memory_info().rss for process in bare_server.processes()) < 6 << 30

    def test_is_greedy_exact(self, bare_server: Server, llama: Path) -> None:
        assert_greedy(bare_server, Reference(llama))


class TestTreeVerify:
    def test_is_greedy_exact(self, tree_server: Server, gemma2: Path) -> None:
        assert_greedy(tree_server, Reference(gemma2))

    def test_samples(self, tree_server: Server, gemma2: Path) -> None:
        """Tokens 2 and 3 come from one verify step; both follow the target at this temperature."""
        count, temperature, top_k, prompt = 400, 8.0, 3, "Hello"
        answers = tree_server.generate(
            [prompt] * count,
            max_new_tokens=3,
            temperature=temperature,
            top_k=top_k,
            ignore_eos=True,
        )
        observed: dict[tuple[int, ...], float] = {}
        for answer in answers:
            tokens = tuple(answer["output_ids"])
            observed[tokens] = observed.get(tokens, 0.0) + 1 / count
        reference = Reference(gemma2)
        expected = {(): 1.0}
        for _ in range(3):
            ids = reference.tokenizer(prompt).input_ids
            rows = reference.next_probs([ids + list(done) for done in expected], temperature, top_k)
            expected = {
                (*done, token): chance * float(row[token])
                for (done, chance), row in zip(expected.items(), rows)
                for token in row.nonzero()[:, 0].tolist()
            }
        assert sorted(expected.values())[-1] < 0.5  # a greedy verify would be far off
        assert set(observed) <= set(expected)
        distance = sum(abs(observed.get(k, 0.0) - p) for k, p in expected.items()) / 2
        assert distance < 0.2  # exact draws: 0.10 on average (27 cells, 400 draws)


class TestChainVerify:
    def test_is_greedy_exact(self, dspark_server: Server, llama: Path) -> None:
        assert_greedy(dspark_server, Reference(llama))


def test_failing_start_shows_the_log_and_leaves_nothing() -> None:
    server = Server("--no-such-flag", env=ENVIRONMENT)
    with pytest.raises(ServerFailed, match="no-such-flag"):
        server.start()
    assert server.processes() == []
    shutil.rmtree(server.folder)
