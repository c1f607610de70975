"""Data on disk: made, resumed, checked; faults are told in one sentence."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

import make_data
import make_prompts
import numpy as np
import pytest
import torch
import train_draft
from fork.errors import ForkError
from tiny_model import write_tiny_model
from train import features
from train.anchors import BatchSource
from train.asks import Asks, different_asks
from train.features import RememberingReader, TargetReader, load_target, load_tokenizer
from train.prompts import OPENINGS, ChatTemplate, read_prompts
from train.sampling import Request, TransformersSampler
from train.token_file import TokenFiles
from training_runs import data_command, train_command

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("tokens.bin", "sequences.bin")]


def test_greedy_answers_are_the_targets(target: Path, data: Path) -> None:
    model, files = load_target(target, "cpu"), TokenFiles([data])
    for index in (0, 31):
        sequence = files[index]
        with torch.no_grad():
            best = model(torch.from_numpy(sequence.tokens)[None]).logits[0].argmax(-1).numpy()
        start = sequence.prompt_length
        np.testing.assert_array_equal(sequence.tokens[start:], best[start - 1 : -1])


def test_sampled_answers_follow_the_temperature(target: Path) -> None:
    model = load_target(target, "cpu")
    requests = [Request([65, 66], heat, 1) for heat in [0.5] * 400 + [3.0] * 400]
    answers = [new[0] for new in TransformersSampler(model).answer(requests, [], seed=0)]
    with torch.no_grad():
        logits = model(torch.tensor([[65, 66]])).logits[0, -1]
    for heat, tokens in ((0.5, answers[:400]), (3.0, answers[400:])):
        probability = (logits / heat).softmax(-1)
        best = int(probability.argmax())
        expected = float(probability[best])
        assert tokens.count(best) / 400 == pytest.approx(expected, abs=0.09)


def test_killed_maker_goes_on_as_if_unbroken(target, prompts, data, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    more = ("--seconds", "1e-9")
    assert make_data.main(data_command(target, prompts, folder, *more)) == 0
    assert len(TokenFiles([folder])) == 30
    with (folder / "tokens.bin").open("ab") as file:  # written, but not yet named by a row
        file.write(b"\1\2\3")
    with (folder / "sequences.bin").open("ab") as file:
        file.write(b"\1")
    assert make_data.main(data_command(target, prompts, folder)) == 0
    assert contents(folder) == contents(data)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokens.bin", lambda b: b[:-10], "tokens.bin is shorter"),
        ("tokens.bin", lambda b: b"\xff" * len(b), "tokens outside the vocabulary"),
        ("sequences.bin", lambda b: b[:-3], "truncated sequences.bin"),
        ("sequences.bin", lambda b: b[:8] + b"\xff" * 8 + b[16:], "corrupt sequences.bin"),
        ("sequences.bin", lambda b: b"", "is empty"),
        ("meta.json", lambda b: b"{}", "no readable meta.json"),
    ],
    ids=["short-tokens", "wild-tokens", "short-rows", "wild-rows", "no-rows", "no-meta"],
)
def test_broken_data_is_refused(name, change, words, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(ForkError, match=words):
        TokenFiles([folder])


def test_target_with_another_tokenizer_is_refused(data: Path, tmp_path: Path, capsys) -> None:
    other = write_tiny_model(tmp_path / "other", vocab_size=330)
    command = train_command(other, data, tmp_path / "run", "--stage", "flow")
    assert train_draft.main(command) == 1
    assert "other has another: make data with this target" in capsys.readouterr().err


def test_data_of_another_target_is_not_mixed(target, prompts, data, tmp_path, capsys) -> None:
    other = write_tiny_model(tmp_path / "other", vocab_size=330)
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    assert make_data.main(data_command(other, prompts, folder)) == 1
    assert "another target or tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "\n\n", "has no prompts"),
        ("p.jsonl", "not json\n", "p.jsonl:1 is no JSON"),
        ("p.jsonl", '{"words": 1}\n', 'none of "prompt"'),
        ("p.jsonl", '{"prompt": 3}\n', "the prompt is no text"),
    ],
    ids=["empty", "no-json", "no-key", "no-text"],
)
def test_unusable_prompts_are_refused(name, text, words, target, tmp_path, capsys) -> None:
    (tmp_path / name).write_text(text)
    assert make_data.main(data_command(target, tmp_path / name, tmp_path / "data")) == 1
    assert words in capsys.readouterr().err


def test_target_without_a_chat_template_needs_prompts(target, tmp_path, capsys) -> None:
    words = ["--target", str(target), "--output", str(tmp_path / "data"), "--device", "cpu"]
    assert make_data.main([*words, "--sampler", "transformers"]) == 1
    assert "no chat template to write prompts from: pass --prompts" in capsys.readouterr().err


def test_prompts_take_the_chat_template(target: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = TEMPLATE
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "hi", "domain": "chat"}\n'
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    texts = [tokenizer.decode(p.ids) for p in read_prompts([path], tokenizer)]
    assert texts == ["<user>hi</end><assistant>", "<user>a</end><assistant>b</end><assistant>"]
    raw = read_prompts([path], tokenizer, raw=True)[0]
    assert (tokenizer.decode(raw.ids), raw.domain) == ("hi", "chat")
    template = ChatTemplate(tokenizer)
    assert tokenizer.decode(template.opening("How")) == "<user>How"
    assert tokenizer.decode(template.after) == "</end><assistant>"


def test_anchors_are_where_a_server_drafts(data: Path) -> None:
    files = TokenFiles([data])
    source = BatchSource(files, batch_size=6, anchors=9, block_size=4, max_length=26, seed=1)
    known = {
        tuple(files[i].tokens[:26].tolist()): files[i].prompt_length for i in range(len(files))
    }
    seen = 0
    for step in range(source.batches_per_epoch):
        batch = source.train_batch(step)
        for tokens, anchors, labels in zip(batch.tokens, batch.anchors, batch.labels):
            row = next(row for row in known if tokens[: len(row)].tolist() == list(row))
            seen += 1
            for anchor, block in zip(anchors.tolist(), labels.tolist()):
                assert known[row] <= anchor <= len(row) - 2
                following = list(row[anchor + 1 : anchor + 5])
                assert block == following + [-1] * (4 - len(following))
    assert seen == source.batches_per_epoch * 6
    again = source.train_batch(2)
    assert torch.equal(again.anchors, source.train_batch(2).anchors)
    assert not torch.equal(again.tokens, source.train_batch(3).tokens)


def test_remembered_states_are_the_targets(
    target: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_TOKENS_AT_ONCE", 100)  # several forwards
    model, files, most = load_target(target, "cpu"), TokenFiles([data, data]), 30
    fresh = TargetReader(model, [0])
    remembering = RememberingReader(model, [0], files, most)
    sizes = {"batch_size": 7, "anchors": 3, "block_size": 4, "max_length": most, "seed": 0}
    source = BatchSource(files, **sizes)
    for step in range(3):
        batch = source.train_batch(step)
        ends = [min(len(files[int(i)].tokens), most) for i in batch.conversations]
        for got, expected in zip(remembering.read(batch), fresh.read(batch)):
            assert got.shape == expected.shape
            for row, end in enumerate(ends):
                torch.testing.assert_close(got[row, :end], expected[row, :end])


def test_remembering_more_than_fits_is_refused(target, data, monkeypatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    with pytest.raises(ForkError, match="--remember needs .* GB"):
        RememberingReader(load_target(target, "cpu"), [0], TokenFiles([data]), 30)


def test_rows_that_ended_are_dropped_and_the_rest_goes_on(target: Path) -> None:
    model = load_target(target, "cpu")
    sampler = TransformersSampler(model)
    prompts = [[65 + i, 70, 90 - i][: 1 + i % 3] for i in range(7)]
    limits = [2, 40, 3, 2, 1, 25, 2]  # most have ended when the batch is looked at, after 16
    requests = [Request(ids, 0.0, limit) for ids, limit in zip(prompts, limits)]
    together = sampler.answer(requests, [], seed=0)
    assert list(map(len, together)) == limits
    assert together == [sampler.answer([request], [], seed=0)[0] for request in requests]


def test_target_writes_whole_user_turns(target: Path, capsys) -> None:
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = TEMPLATE
    template = ChatTemplate(tokenizer)

    class Sampler:
        calls = 0

        def answer(self, requests, stop_ids, seed):
            self.calls += 1
            assert template.after[0] in stop_ids
            # One turn ended by itself, one cut off, one empty.
            answers = ([66, 67, template.after[0]], [66] * 5, [template.after[0]])
            return [list(answers[i % 3]) for i in range(len(requests))]

    options = argparse.Namespace(target=target, count=12, batch_size=15, prompt_tokens=5, seed=0)
    sampler = Sampler()
    prompts = make_data.write_turns(sampler, tokenizer, options)
    assert len(prompts) == 12 and sampler.calls == 3
    end = [66, 67, *template.after]
    assert all(prompt.ids[-len(end) :] == end for prompt in prompts)
    assert all(prompt.ids[: len(template.before)] == template.before for prompt in prompts)
    assert {prompt.domain for prompt in prompts} == set(OPENINGS)


def test_asks_fill_every_field(tmp_path: Path) -> None:
    words = {
        "domains": {"a": ["{word^} of {3-3} {word+2-2}"], "b": ["only this"]},
        "fillers": {"word": ["cup{1-1}", "tea"]},
    }
    path = tmp_path / "asks.json"
    path.write_text(json.dumps(words))
    drawn = list(different_asks(Asks(path, seed=1), 100, banned={"Only THIS "}))
    assert {domain for _, domain in drawn} == {"a"}
    assert {text for text, _ in drawn} == {
        f"{first} of 3 {rest}" for first in ("Cup1", "Tea") for rest in ("cup1, tea", "tea, cup1")
    }


def test_shipped_asks() -> None:
    drawn = list(different_asks(Asks(), 4000, banned=set()))
    assert len({text.lower() for text, _ in drawn}) == 4000
    assert {domain for _, domain in drawn} == set(OPENINGS)
    # Fields that no filler was found for would stay; code and formulas have braces of their own.
    assert not [text for text, domain in drawn if domain in ("chat", "math") and "{" in text]


def test_make_prompts_leaves_out_what_drafts_are_measured_on(tmp_path: Path) -> None:
    asks, held, parts = tmp_path / "asks.json", tmp_path / "held.jsonl", []
    asks.write_text(json.dumps({"domains": {"math": ["{1-9}+1"]}, "fillers": {}}))
    held.write_text(json.dumps({"prompt": "4+1"}))
    for index in (1, 2):
        parts.append(tmp_path / f"{index}.jsonl")
        command = ["--count", "8", "--part", f"{index}/2", "--asks", str(asks)]
        command += ["--held-out", str(held), "--output", str(parts[-1])]
        assert make_prompts.main(command) == 0
    lines = [[json.loads(line)["prompt"] for line in path.open()] for path in parts]
    assert [len(some) for some in lines] == [4, 4]
    assert sorted(lines[0] + lines[1]) == [f"{n}+1" for n in range(1, 10) if n != 4]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("{", "cannot be read"),
        ({"domains": {"a": "text"}, "fillers": {}}, "no list of texts"),
        ({"domains": {"a": ["{b}"]}, "fillers": {}}, "too few fillers of {b}"),
        ({"domains": {"a": ["{b+2-3}"]}, "fillers": {"b": ["x", "y"]}}, "too few fillers of {b}"),
    ],
)
def test_bad_asks_are_told(words, fault: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "asks.json"
    path.write_text(words if isinstance(words, str) else json.dumps(words))
    assert make_prompts.main(["--asks", str(path), "--output", str(tmp_path / "p")]) == 1
    said = capsys.readouterr().err
    assert fault in said and said.startswith("error: ") and said.count("\n") == 1
