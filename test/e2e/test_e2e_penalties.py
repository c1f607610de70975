"""Penalties, logit processors and seeds against transformers, which counts every token before it
chooses the next.

A server without speculation would not do as the reference: with overlap scheduling it counts a step
late, and a request that was retracted starts anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafts.folders import write_oracle
from drafts.replay import Corruption, Reference
from e2e_cases import assert_pool_is_free, flashmap_server, flush_cache
from e2e_processors import Force, Rhythm
from serving import Server
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from tiny_model import write_tiny_model

NUM_TOKENS = 80
BLOCK = 16
END = 0
MINIMUM = 30
PARAMS: dict[str, dict[str, Any]] = {
    "free": {},
    "frequency": dict(frequency_penalty=0.7),
    "presence": dict(presence_penalty=1.5),
    "repetition": dict(repetition_penalty=1.4),
    "minimum": dict(repetition_penalty=1.4, min_new_tokens=MINIMUM),
    "all": dict(
        frequency_penalty=0.3,
        presence_penalty=0.6,
        repetition_penalty=1.2,
        min_new_tokens=MINIMUM,
    ),
    "biased": dict(
        frequency_penalty=0.5, repetition_penalty=1.3, logit_bias={"65": 1.5, "66": -1.0}
    ),
}
REPEATS = "x" * 100  # goes on with repeats, so that every penalty changes it at once
PROMPTS = ("Hello world", "The quick brown fox jumps over", "0 1 2 3 4 5", REPEATS)
TOP_K = 3
PROCESSORS = {
    "force": (Force, dict(token=42)),
    "rhythm": (Rhythm, dict(token=77)),
    "disallowed": (DisallowedTokensLogitsProcessor, dict(token_ids=list(range(60, 90)))),
}
PROCESSED: dict[str, Any] = dict(temperature=0.0, max_new_tokens=48, ignore_eos=True)


class Decoder:
    """Transformers on the target, one token at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    @torch.no_grad()
    def logits(self, prompt: list[int], said: list[list[int]], params: list[dict]) -> torch.Tensor:
        """What the next tokens after outputs of one length are chosen by, `(len(said), V)`."""
        rows = self.model(torch.tensor([prompt + output for output in said])).logits[:, -1]
        for logits, output, asked in zip(rows, said, params):
            repetition = asked.get("repetition_penalty", 1.0)
            for token, count in Counter(output).items():
                logits[token] -= count * asked.get("frequency_penalty", 0.0)
                logits[token] -= asked.get("presence_penalty", 0.0)
                logits[token] *= repetition if logits[token] < 0 else 1 / repetition
            if len(output) < asked.get("min_new_tokens", 0):
                logits[END] = float("-inf")
            for token, bias in asked.get("logit_bias", {}).items():
                logits[int(token)] += bias
        return rows

    def greedy(
        self, prompt: list[int], params: list[dict], num_tokens: int = NUM_TOKENS
    ) -> list[list[int]]:
        """The text after `prompt` under each of `params`, up to its end."""
        said: list[list[int]] = [[] for _ in params]
        for _ in range(num_tokens):
            chosen = self.logits(prompt, said, params).argmax(-1).tolist()
            for output, token in zip(said, chosen):
                output.append(token)
        return [o[: o.index(END) + 1] if END in o else o for o in said]


@dataclass(frozen=True)
class Case:
    """A prompt under some penalties, and its greedy text."""

    name: str
    prompt: list[int]
    output: list[int]

    @property
    def params(self) -> dict[str, Any]:
        return dict(temperature=0.0, max_new_tokens=NUM_TOKENS, **PARAMS[self.name])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("penalties") / "target")


@pytest.fixture(scope="module")
def decoder(target: Path) -> Decoder:
    return Decoder(target)


@pytest.fixture(scope="module")
def texts(decoder: Decoder) -> list[Case]:
    found = []
    for prompt in map(decoder.ids, PROMPTS):
        outputs = decoder.greedy(prompt, list(PARAMS.values()))
        found += [Case(name, prompt, output) for name, output in zip(PARAMS, outputs)]
    return found


@pytest.fixture(scope="module")
def processed(decoder: Decoder) -> list[Case]:
    """Greedy texts under the processors."""
    found = []
    for prompt in map(decoder.ids, PROMPTS[:2]):
        for name, (processor, params) in PROCESSORS.items():
            said: list[int] = []
            while len(said) < PROCESSED["max_new_tokens"]:
                logits = decoder.logits(prompt, [said], [{}])
                req = SimpleNamespace(origin_input_ids=prompt, output_ids=said)
                said.append(int(processor()(logits, [params | {"__req__": req}]).argmax()))
            found.append(Case(name, prompt, said))
    return found


@pytest.fixture(scope="module")
def server(
    target: Path, texts: list[Case], processed: list[Case], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Drafts mostly what comes next; a pool too small for all cases at once; short chunks."""
    from make_draft import main as make_draft

    folder = tmp_path_factory.mktemp("drafts")
    sizes = ("--block-size", BLOCK, "--hidden-size", 64, "--layers", 1)
    arguments = ("--target", target, "--output", folder / "untrained", *sizes)
    assert not make_draft([str(a) for a in arguments])
    references = [Reference(tuple(case.prompt), tuple(case.output)) for case in texts + processed]
    write_oracle(
        folder / "oracle", folder / "untrained", references, Corruption((0.1, 0.05), seed=1)
    )
    limits = ("--max-total-tokens", 1000, "--chunked-prefill-size", 64)
    limits += ("--schedule-conservativeness", 0.1)
    running = flashmap_server(
        target, folder / "oracle", *limits, "--enable-custom-logit-processor"
    )
    running.env["PYTHONPATH"] += f":{Path(__file__).parent}"
    with running:
        yield running


def ask(server: Server, cases: list[Case], **payload: Any) -> list[dict[str, Any]]:
    sent = dict(
        input_ids=[case.prompt for case in cases],
        sampling_params=[case.params for case in cases],
        **payload,
    )
    return server.request("/generate", sent)


# --- greedy ----------------------------------------------------------------------------------


def test_mixed_batch_that_the_pool_cannot_hold(server: Server, texts: list[Case]) -> None:
    answers = ask(server, texts)
    for case, answer in zip(texts, answers):
        assert answer["output_ids"] == case.output, case.name
    retracted = {c.name for c, a in zip(texts, answers) if a["meta_info"]["num_retractions"]}
    assert len(retracted) > len(PARAMS) // 2, "the pool held nearly everything"
    assert_pool_is_free(server)


def test_one_request_that_the_pool_cannot_hold(server: Server, texts: list[Case]) -> None:
    """Nothing is left to retract: it ends for its length, with the text that it has."""
    case = texts[0]
    answer = server.generate(case.prompt, max_new_tokens=1900, ignore_eos=True)
    assert answer["output_ids"][: len(case.output)] == case.output
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert 900 < len(answer["output_ids"]) < 1000
    (again,) = ask(server, [case])
    assert again["output_ids"] == case.output
    assert_pool_is_free(server)


def test_each_kind_with_long_accepts(server: Server, texts: list[Case]) -> None:
    cases = texts[-len(PARAMS) :]
    answers = ask(server, cases)
    free, *penalized = [answer["output_ids"] for answer in answers]
    assert [free, *penalized] == [case.output for case in cases]
    for output, answer in zip(penalized, answers[1:]):
        assert output[:NUM_TOKENS] != free and len(set(output)) > 2 * len(set(free))
        meta = answer["meta_info"]
        assert meta["num_retractions"] == 0
        assert meta["completion_tokens"] > 5 * meta["spec_verify_ct"]


def test_minimum_length_ends_within_a_block(server: Server, texts: list[Case]) -> None:
    """The end of text is banned in the first rows of a block and chosen soon after."""
    short = next(case for case in texts if case.name == "repetition" and len(case.output) < 10)
    case = next(c for c in texts if c.name == "minimum" and c.prompt == short.prompt)
    assert short.output[-1] == END and END not in case.output[:MINIMUM]
    (answer,) = ask(server, [case])
    assert answer["output_ids"] == case.output
    # A stop token of the request's own, banned up to within an accepted block.
    stop = case.output[MINIMUM + 5]
    params = dict(PARAMS["minimum"], stop_token_ids=[stop])
    assert stop not in case.output[: MINIMUM + 5]
    answer = server.generate(case.prompt, max_new_tokens=NUM_TOKENS, **params)
    assert answer["output_ids"] == case.output[: MINIMUM + 6]


def test_cached_prompts_and_generated_prefixes(
    server: Server, texts: list[Case], decoder: Decoder
) -> None:
    case = texts[-1]
    flush_cache(server)
    for cached in (0, len(case.prompt) - 1):
        (answer,) = ask(server, [case])
        assert answer["meta_info"]["cached_tokens"] == cached
        assert answer["output_ids"] == case.output
    # As a prompt, the output is in the cache, but counts no more.
    prompt = case.prompt + case.output[:40]
    answer = server.generate(prompt, max_new_tokens=20, **PARAMS[case.name])
    assert answer["meta_info"]["cached_tokens"] >= len(prompt) - 1
    assert answer["output_ids"] == decoder.greedy(prompt, [PARAMS[case.name]], 20)[0]
    assert answer["output_ids"] != case.output[40:60]


def test_logprobs_are_of_the_penalized_logits(
    server: Server, texts: list[Case], decoder: Decoder
) -> None:
    case = texts[-1]
    (answer,) = ask(server, [case], return_logprob=True)
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, *_ in entries] == case.output
    for i in (0, 1, 2, 20, 50):
        (logits,) = decoder.logits(case.prompt, [case.output[:i]], [PARAMS[case.name]])
        expected = float(logits.log_softmax(-1)[case.output[i]])
        assert entries[i][0] == pytest.approx(expected, abs=1e-4)


# --- sampled ---------------------------------------------------------------------------------


def test_sampled_texts_have_the_penalized_distribution(
    server: Server, texts: list[Case], decoder: Decoder
) -> None:
    """Three tokens each, of the three likeliest: the first of the prefill, two of one block."""
    prompt, params = texts[-1].prompt, dict(frequency_penalty=1.0, repetition_penalty=1.2)
    expected = {(): 1.0}
    for _ in range(3):
        said = [list(output) for output in expected]
        top = decoder.logits(prompt, said, [params] * len(said)).topk(TOP_K)
        expected = {
            (*output, token): probability * p
            for (output, probability), tokens, probs in zip(
                expected.items(), top.indices.tolist(), top.values.softmax(-1).tolist()
            )
            for token, p in zip(tokens, probs)
        }
    draws = 600
    sampling = dict(temperature=1.0, top_k=TOP_K, max_new_tokens=3, ignore_eos=True, **params)
    answers = server.request(
        "/generate",
        dict(
            input_ids=[prompt] * draws,
            sampling_params=[dict(sampling, sampling_seed=seed) for seed in range(draws)],
        ),
    )
    found = Counter(tuple(answer["output_ids"]) for answer in answers)
    assert found.keys() <= expected.keys()
    assert max(Counter(output).most_common(1)[0][1] for output in found) > 1
    # Pearson's statistic of 26 degrees of freedom; the seeds are fixed, so is the value.
    chi2 = sum((found[o] - draws * p) ** 2 / (draws * p) for o, p in expected.items())
    assert chi2 < 54  # passed by chance once in 1000 choices of seeds
    two = [a for a in answers if a["meta_info"].get("spec_verify_ct") == 1]
    assert len(two) > draws / 20, "hardly any block was accepted"


def test_a_seed_decides_the_text(server: Server, texts: list[Case]) -> None:
    """Alone, again, in a batch, and over the OpenAI API; no server flag is needed."""
    prompt = texts[0].prompt
    base = dict(temperature=1.0, max_new_tokens=24, ignore_eos=True)
    seeded = dict(base, sampling_seed=7, min_p=0.01, repetition_penalty=1.1)
    alone = [server.generate(prompt, **seeded)["output_ids"] for _ in range(2)]
    batch = [seeded, base, dict(base, sampling_seed=8), dict(base, temperature=0.0), seeded]
    answers = server.request(
        "/generate", dict(input_ids=[prompt] * len(batch), sampling_params=batch)
    )
    outputs = [answer["output_ids"] for answer in answers]
    assert alone[0] == alone[1] == outputs[0] == outputs[4]
    assert len({tuple(output) for output in outputs}) == 4
    assert outputs[3] == texts[0].output[:24]

    samples = server.generate(prompt, **dict(seeded, n=3))
    assert samples[0]["output_ids"] == alone[0]
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 3

    completion = dict(model="m", prompt=prompt, max_tokens=24, temperature=1.0, ignore_eos=True)
    bodies = [dict(completion, seed=seed) for seed in (7, 7, 9)]
    said = [server.request("/v1/completions", b)["choices"][0]["text"] for b in bodies]
    assert said[0] == said[1] != said[2]


def test_first_tokens_are_random_without_a_seed(server: Server, texts: list[Case]) -> None:
    sampling = dict(temperature=2.0, max_new_tokens=1)
    answers = server.request(
        "/generate", dict(input_ids=[texts[0].prompt] * 32, sampling_params=[sampling] * 32)
    )
    assert len({answer["output_ids"][0] for answer in answers}) > 8


# --- custom logit processors -----------------------------------------------------------------


def test_logit_processors_see_the_block(
    server: Server, processed: list[Case], texts: list[Case]
) -> None:
    """Each row of a block is processed as the request will be when it has said the drafts."""
    free = next(case for case in texts if case.prompt == processed[0].prompt)
    answers = server.request(
        "/generate",
        dict(
            input_ids=[case.prompt for case in (free, *processed)],
            sampling_params=[
                dict(free.params, ignore_eos=True),
                *(dict(PROCESSED, custom_params=PROCESSORS[case.name][1]) for case in processed),
            ],
            custom_logit_processor=[None, *(PROCESSORS[c.name][0].to_str() for c in processed)],
            return_logprob=True,
        ),
    )
    assert answers[0]["output_ids"][: len(free.output)] == free.output
    for case, answer in zip(processed, answers[1:]):
        assert answer["output_ids"] == case.output, case.name
        meta = answer["meta_info"]
        assert meta["num_retractions"] == 0
        assert meta["spec_verify_ct"] < len(case.output) / 3, "no block was accepted"
        assert len(meta["output_token_logprobs"]) == len(case.output)
    forced = next(i for i, case in enumerate(processed) if case.name == "force")
    assert set(answers[1 + forced]["output_ids"]) == {42}
    assert all(p == 0 for p, *_ in answers[1 + forced]["meta_info"]["output_token_logprobs"])


# --- what is refused, and what is not --------------------------------------------------------


def test_stop_tokens_outside_the_vocabulary(server: Server, texts: list[Case]) -> None:
    answer = server.generate(
        texts[0].prompt, max_new_tokens=6, min_new_tokens=3, stop_token_ids=[10**7, -3]
    )
    assert answer["output_ids"] == texts[0].output[:6]
