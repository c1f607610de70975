"""`scripts/make_draft.py` against the published model code (flashmap 0.1.0) and its own words."""

import json
import re
from pathlib import Path
from typing import Any

import flashmap
import make_draft
import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.speculative.flashmap.checkpoint import check_folder

LLAMA = {
    "model_type": "llama",
    "hidden_size": 96,
    "vocab_size": 300,
    "num_hidden_layers": 8,
    "tie_word_embeddings": True,
    "eos_token_id": [7, 5],
    "torch_dtype": "float32",
}
FILES = ["config.json", "draft_vocab.safetensors", "model.safetensors"]


def write_target(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", LLAMA)


def make(target: Path, output: Path, *options: str) -> Path:
    assert make_draft.main(["--target", str(target), "--output", str(output), *options]) == 0
    return output


def load(folder: Path) -> flashmap.FlashMapDraftModel:
    """The draft as the published code loads it; every tensor must be found and used."""
    model, info = flashmap.FlashMapDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--noise-gate", "constant", "--block-size", "5", "--draft-vocab-size", "40"),
        ("--hidden-size", "192", "--heads", "2", "--layers", "1", "--intermediate-size", "200"),
    ],
    ids=["defaults", "constant gate", "head dim 96"],
)
def test_loads_into_flashmap_and_into_the_server(
    options: tuple[str, ...], target: Path, tmp_path: Path
) -> None:
    folder = make(target, tmp_path / "draft", *options)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    state = load(folder).state_dict()
    stored = load_file(folder / "model.safetensors")
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)

    config = FlashMapConfig.from_pretrained(folder)
    check_folder(folder, config, draft_vocab_size=300)
    config.validate_for_target(hidden_size=96, vocab_size=300, num_hidden_layers=8)


def draft_logits(model: flashmap.FlashMapDraftModel, **changed: int) -> torch.Tensor:
    """Logits (16, 300) of one block; `changed` reseeds the noise or the context, or the anchor."""

    def normal(name: str, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(changed.get(name, 0))
        return torch.randn(shape, generator=generator)

    embedding = torch.nn.Embedding(300, 96, _weight=normal("embedding", 300, 96))
    lm_head = torch.nn.Linear(96, 300, bias=False)
    lm_head.weight = embedding.weight
    cache = flashmap.FlashMapCache(model.config, 1, 32)
    with torch.no_grad():
        model.extend_context(cache, normal("context", 1, 9, 5 * 96))
        anchor = torch.tensor([changed.get("anchor", 0)])
        noise = normal("noise", 1, 16, 300)
        return model.draft(anchor, cache, embedding, lm_head, noise=noise)[0]


def test_everything_the_draft_reads_moves_its_logits(target: Path, tmp_path: Path) -> None:
    model = load(make(target, tmp_path / "draft"))
    logits = draft_logits(model)
    assert logits.isfinite().all() and logits.abs().max() < 300
    assert logits.std(dim=-1).min() > 1
    for name in ("noise", "context", "anchor"):
        assert (draft_logits(model, **{name: 1}) - logits).abs().mean() > 0.01, name
    assert torch.equal(draft_logits(model), logits)


def test_seed_decides_every_byte(target: Path, tmp_path: Path) -> None:
    def contents(name: str, *options: str) -> list[bytes]:
        folder = make(target, tmp_path / name, *options)
        return [(folder / file).read_bytes() for file in FILES]

    first, same, other = contents("a"), contents("b", "--seed", "0"), contents("c", "--seed", "1")
    assert first == same
    assert first[:2] == other[:2] and first[2] != other[2]
    # NumPy's own stream, so that another machine or release gets these values too.
    values = load_file(tmp_path / "a" / "model.safetensors")["fc.weight"][0, :3].tolist()
    assert values == pytest.approx([-0.07860856, 0.006897364, -0.03855890], rel=1e-6)


def test_draft_vocabulary_ranks_every_token(target: Path, tmp_path: Path) -> None:
    folder = make(target, tmp_path / "draft", "--draft-vocab-size", "10")
    vocabulary = load_file(folder / "draft_vocab.safetensors")
    assert vocabulary["ids"].tolist()[:9] == [5, 7, 0, 1, 2, 3, 4, 6, 8]
    assert sorted(vocabulary["ids"].tolist()) == list(range(300))
    counts = vocabulary["counts"].tolist()
    assert counts == sorted(counts, reverse=True) and counts[-1] > 0
    assert FlashMapConfig.from_pretrained(folder).draft_vocab_size == 10


def test_geometry_of_the_published_draft_for_qwen3_8b(tmp_path: Path) -> None:
    config = {"hidden_size": 4096, "vocab_size": 151936, "num_hidden_layers": 36}
    target = make_draft.Target.read(write_target(tmp_path / "Qwen3-8B", config))
    options = make_draft.argparse.Namespace(
        hidden_size=None,
        layers=None,
        heads=None,
        intermediate_size=None,
        block_size=16,
        noise_gate="jump",
        draft_vocab_size=0,
    )
    actual, release = make_draft.draft_config(target, options), flashmap.FlashMapConfig()
    for key in set(make_draft.config_json(actual, "bfloat16")) - {"target_model", "torch_dtype"}:
        assert getattr(actual, key) == getattr(release, key, getattr(actual, key)), key


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (2, [0]),
        (3, [1]),
        (4, [1]),
        (6, [1, 2, 3]),
        (8, [1, 2, 3, 4, 5]),
        (30, [1, 8, 14, 20, 27]),
        (36, [1, 9, 17, 25, 33]),
    ],
)
def test_layers_read(layers: int, expected: list[int], tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", LLAMA | {"num_hidden_layers": layers})
    assert make_draft.Target.read(folder).layer_ids() == expected


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"model_type": "some_vlm", "text_config": LLAMA, "vocab_size": 9}, (96, 300, 8)),
        ({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4}, (64, 32000, 4)),
    ],
    ids=["nested text model", "size left to its default"],
)
def test_target_sizes(config: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path) -> None:
    target = make_draft.Target.read(write_target(tmp_path / "target", config))
    assert (target.hidden_size, target.vocab_size, target.num_hidden_layers) == sizes


REFUSALS = {
    "no target": ({}, {"--target": "nowhere"}, "is not a folder"),
    "target without config": ({}, {"--target": "."}, "has no readable config.json"),
    "one layer": ({"num_hidden_layers": 1}, {}, "choose a target with at least 2"),
    "unknown size": ({"vocab_size": None, "model_type": "?"}, {}, "does not tell all of"),
    "draft vocabulary too large": ({}, {"--draft-vocab-size": 301}, "choose 0 .all tokens. to 300"),
    "block too long": ({}, {"--block-size": 65}, "block_size must be at most 64"),
    "no block": ({}, {"--block-size": 0}, "block_size must be an integer of at least 1"),
    "no layers": ({}, {"--layers": 0}, "num_hidden_layers must be an integer of at least 1"),
    "indivisible width": ({}, {"--hidden-size": 200}, "200 is not a multiple of num_.*_heads 3"),
    "negative seed": ({}, {"--seed": -1}, "choose 0 or more"),
    "output is a file": ({}, {"--output": "target/config.json"}, "is a file: choose another"),
    "output under a file": ({}, {"--output": "target/config.json/x"}, "x cannot be written .File"),
}


@pytest.mark.parametrize(("config", "options", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(
    config: dict[str, Any],
    options: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_target(tmp_path / "target", LLAMA | config)
    arguments = {"--target": "target", "--output": "draft"} | options
    command = [str(part) for pair in arguments.items() for part in pair]
    assert make_draft.main(command) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.endswith(".")
    assert re.search(words, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_output_is_kept_unless_forced(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(target, tmp_path / "draft")
    before = (folder / "model.safetensors").read_bytes()
    (folder / "stale.safetensors").touch()
    again = ["--target", str(target), "--output", str(folder), "--seed", "1"]
    assert make_draft.main(again) == 1
    assert "is not empty: choose another or pass --force" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == before

    assert make_draft.main([*again, "--force"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert (folder / "model.safetensors").read_bytes() != before


def test_force_replaces_nothing_but_a_draft(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_draft.main(["--target", str(target), "--output", str(target), "--force"]) == 1
    assert "is not a FlashMap draft" in capsys.readouterr().err
    assert (target / "config.json").exists()


def test_says_what_it_wrote(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(target, tmp_path / "draft", "--dtype", "bfloat16")
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    words = capsys.readouterr().out
    assert f"{sum(w.numel() for w in weights.values()) / 1e6:.1f}M parameters in bfloat16" in words
    assert " MB;" in words and "reading target layers [1, 2, 3, 4, 5] of 8" in words
