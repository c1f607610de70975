"""A release folder's tensors: what does not fit its config is refused by name, from headers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import flashmap
import pytest
import torch
from draft_pair import draft_sizes
from release_folder import VOCAB_FILE, WEIGHTS, edit, release_keys, write_release
from safetensors.torch import load_file, save_file
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.models.flashmap import FlashMapDraftModel
from sglang.srt.speculative.flashmap.checkpoint import (
    FlashMapCheckpointError,
    check_folder,
    draft_vocabulary,
    expected_shapes,
)

CONFIG = FlashMapConfig(**release_keys())
VOCAB = CONFIG.vocab_size


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return write_release(tmp_path / "draft")


@pytest.mark.parametrize("sizes", [{}, dict(noise_gate="constant")], ids=["jump", "constant"])
def test_expected_tensors_are_the_packages(sizes: dict) -> None:
    keys = draft_sizes(**sizes)
    reference = flashmap.FlashMapDraftModel(flashmap.FlashMapConfig(**keys)).state_dict()
    shapes = {name: tuple(value.shape) for name, value in reference.items()}
    assert expected_shapes(FlashMapConfig(**keys)) == shapes


def test_expected_tensors_are_the_models_with_grouped_heads() -> None:
    config = FlashMapConfig(**draft_sizes(num_key_value_heads=1))
    model = FlashMapDraftModel(config)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert expected_shapes(config) == shapes


def test_a_complete_folder_passes(release: Path) -> None:
    check_folder(release, CONFIG, draft_vocab_size=7)
    (release / VOCAB_FILE).unlink()
    check_folder(release, CONFIG, draft_vocab_size=0)


def test_shards_pass(release: Path) -> None:
    tensors = load_file(release / WEIGHTS)
    (release / WEIGHTS).unlink()
    for shard in range(2):
        part = dict(list(tensors.items())[shard::2])
        save_file(part, release / f"model-0000{shard + 1}-of-00002.safetensors")
    check_folder(release, CONFIG, draft_vocab_size=0)
    (release / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FlashMapCheckpointError, match="lacks .* more tensors"):
        check_folder(release, CONFIG, draft_vocab_size=0)


def rename(old: str, new: str) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        tensors[new] = tensors.pop(old)

    return change


def resize(name: str) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        tensors[name] = torch.cat([tensors[name], tensors[name]])

    return change


BAD_WEIGHTS: dict[str, tuple[Callable[[dict], object], str]] = {
    "missing": (lambda t: t.pop("fc.weight"), "lacks fc.weight; use a complete FlashMap release"),
    "missing-layer": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.1.")],
        "lacks layers.1.* and .* more tensors",
    ),
    "extra": (lambda t: t.update(extra=torch.ones(1)), "has the unexpected extra"),
    "renamed": (
        rename("noise_gate", "noise_gates"),
        "lacks noise_gate and has the unexpected noise_gates",
    ),
    "shape": (
        resize("head.weight"),
        r"tensor head.weight has shape \(64, 16\), its config.json asks for \(32, 16\)",
    ),
    "gate-shape": (lambda t: t.update(noise_gate=torch.ones(())), "tensor noise_gate has shape"),
}


@pytest.mark.parametrize("change, message", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_bad_weights(release: Path, change: Callable, message: str) -> None:
    edit(release / WEIGHTS, change)
    with pytest.raises(FlashMapCheckpointError, match=message) as caught:
        check_folder(release, CONFIG, draft_vocab_size=0)
    assert str(release) in str(caught.value)
    # A folder that is checked only when it is loaded (a Hub repository) is refused all the same.
    with pytest.raises(FlashMapCheckpointError, match=message):
        FlashMapDraftModel(CONFIG).load_weights(load_file(release / WEIGHTS).items())


@pytest.mark.parametrize("size", [0, 5, 200, -3], ids=["empty", "5-bytes", "header", "data"])
@pytest.mark.parametrize("name", [WEIGHTS, VOCAB_FILE], ids=["weights", "vocabulary"])
def test_truncated_files(release: Path, name: str, size: int) -> None:
    content = (release / name).read_bytes()
    (release / name).write_bytes(content[:size])
    with pytest.raises(FlashMapCheckpointError, match="cannot be read as safetensors .*fetch it"):
        check_folder(release, CONFIG, draft_vocab_size=7)


def test_another_weight_format_is_not_read(release: Path) -> None:
    (release / WEIGHTS).rename(release / "pytorch_model.bin")
    with pytest.raises(FlashMapCheckpointError, match="no model.safetensors; use a complete"):
        check_folder(release, CONFIG, draft_vocab_size=7)


BAD_RANKINGS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no-ids": ({"counts": torch.arange(VOCAB)}, "has no tensor ids; use the file of the release"),
    "too-few": ({"ids": torch.arange(VOCAB - 1)}, f"must rank all {VOCAB} tokens"),
    "a-matrix": ({"ids": torch.arange(VOCAB)[None]}, f"must rank all {VOCAB} tokens"),
}


@pytest.mark.parametrize("tensors, message", BAD_RANKINGS.values(), ids=BAD_RANKINGS)
def test_bad_ranking_files(release: Path, tensors: dict, message: str) -> None:
    save_file(tensors, release / VOCAB_FILE)
    with pytest.raises(FlashMapCheckpointError, match=message):
        check_folder(release, CONFIG, draft_vocab_size=7)
    check_folder(release, CONFIG, draft_vocab_size=0)  # not needed for the whole vocabulary


def test_missing_ranking_file(release: Path) -> None:
    (release / VOCAB_FILE).unlink()
    with pytest.raises(FlashMapCheckpointError, match="draft-vocab-size 0 to draft over the whole"):
        check_folder(release, CONFIG, draft_vocab_size=7)


def test_draft_vocabulary_is_the_head_of_the_ranking_in_id_order() -> None:
    ranking = torch.tensor([5, 3, 9, 0, 7], dtype=torch.int32)
    assert draft_vocabulary(ranking, 3, 10).tolist() == [3, 5, 9]
    assert draft_vocabulary(ranking, 3, 10).dtype == torch.int64


@pytest.mark.parametrize(
    "ranking, size, message",
    [
        ([5, 3, 5], 2, "ids must be distinct token ids below 10"),
        ([5, 3, 10], 2, "ids must be distinct token ids below 10"),
        ([5, -1, 2], 2, "ids must be distinct token ids below 10"),
        ([[5, 3, 2]], 2, "ids must be distinct token ids below 10"),
        ([5, 3, 2], 4, "draft-vocab-size 4 is more than the 3 tokens"),
    ],
    ids=["twice", "past-the-end", "negative", "a-matrix", "too-few"],
)
def test_bad_rankings(ranking: list, size: int, message: str) -> None:
    with pytest.raises(FlashMapCheckpointError, match=message):
        draft_vocabulary(torch.tensor(ranking), size, 10)
