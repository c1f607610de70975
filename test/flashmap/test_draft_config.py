"""FlashMapConfig: the package's defaults, and a clear sentence for what nobody can serve."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flashmap
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from release_folder import release_keys, write_release
from sglang.srt.arg_groups.flashmap_hook import read_draft_config
from sglang.srt.configs.flashmap import FlashMapConfig, FlashMapConfigError
from sglang.srt.speculative.flashmap.checkpoint import expected_shapes


def read(folder: Path, content: str | dict) -> FlashMapConfig:
    """What a server makes of a new draft folder inside `folder` with this config.json."""
    text = content if isinstance(content, str) else json.dumps(content)
    # Reading is cached by path.
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "config.json").write_text(text)
    return read_draft_config(
        SimpleNamespace(
            speculative_draft_model_path=str(folder), speculative_draft_model_revision=None
        )
    )


def test_defaults_are_the_packages() -> None:
    ours, theirs = FlashMapConfig().to_dict(), flashmap.FlashMapConfig().to_dict()
    assert {key: ours[key] for key in theirs} == theirs
    assert ours["num_key_value_heads"] == ours["num_attention_heads"]
    assert FlashMapConfig().head_dim == 128


def test_a_release_is_read_as_written(tmp_path: Path) -> None:
    keys = release_keys(head_dim=8, max_position_embeddings=40)
    config = read(tmp_path, keys)
    assert isinstance(config, FlashMapConfig)
    for name in release_keys():
        assert getattr(config, name) == keys[name]
    assert config.grid() == [0.0, 1.0] and config.grid(3) == [0.0, 0.5, 0.75, 1.0]
    assert config.max_position_embeddings >= 1 << 30  # a draft has no length limit of its own


def test_saved_and_copied_configs_are_equal(tmp_path: Path) -> None:
    config = FlashMapConfig(**release_keys())
    config.save_pretrained(tmp_path)
    assert FlashMapConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert copy.deepcopy(config).to_dict() == config.to_dict()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stage-1-flow": (dict(flow_map=False), "flow_map is false, a stage-1 flow"),
    "flow-map-text": (dict(flow_map="false"), "flow_map must be true or false"),
    "block-0": (dict(block_size=0), "block_size must be an integer of at least 1, got 0"),
    "block-65": (dict(block_size=65), "block_size must be at most 64"),
    "block-text": (dict(block_size="8"), "block_size must be an integer"),
    "block-true": (dict(block_size=True), "block_size must be an integer"),
    "vocab-negative": (dict(vocab_size=-1), "vocab_size must be an integer"),
    "hidden-text": (dict(hidden_size="16"), "hidden_size must be an integer"),
    "hidden-null": (dict(hidden_size=None), "hidden_size must be an integer"),
    "hidden-uneven": (dict(hidden_size=17), "hidden_size 17 is not a multiple"),
    "no-heads": (dict(num_attention_heads=0), "num_attention_heads must be an integer"),
    "kv-heads": (dict(num_key_value_heads=3), "not a multiple of num_key_value_heads 3"),
    "head-dim-odd": (dict(hidden_size=18), "head_dim 9 .* must be even"),
    "head-dim-wide": (dict(hidden_size=1024), "head_dim 512 .* at most 256"),
    "head-dim-other": (dict(head_dim=16), "head_dim 16 is not hidden_size / num_attention_heads"),
    "method": (dict(grid=[0, 1]), "grid is no key of a draft but a function"),
    "inherited-method": (dict(to_dict={}), "to_dict is no key of a draft but a function"),
    "layers-2000": (dict(num_hidden_layers=2000), "num_hidden_layers must be at most 1024"),
    "time-odd": (dict(time_embed_dim=15), "time_embed_dim must be even"),
    "theta-0": (dict(rope_theta=0), "rope_theta must be a positive number"),
    "theta-infinite": (dict(rope_theta=float("inf")), "rope_theta must be a positive number"),
    "eps-nan": (dict(rms_norm_eps=float("nan")), "rms_norm_eps must be a positive number"),
    "eps-text": (dict(qk_norm_eps="1e-6"), "qk_norm_eps must be a positive number"),
    "gate": (dict(noise_gate="none"), 'noise_gate must be "jump" or "constant"'),
    "ids-empty": (dict(target_layer_ids=[]), "target_layer_ids must be a non-empty list"),
    "ids-null": (dict(target_layer_ids=None), "target_layer_ids must be a non-empty list"),
    "ids-text": (dict(target_layer_ids="012"), "target_layer_ids must be a non-empty list"),
    "ids-negative": (dict(target_layer_ids=[-1, 2]), "every entry of target_layer_ids"),
    "ids-float": (dict(target_layer_ids=[0, 2.0]), "every entry of target_layer_ids"),
    "ids-falling": (dict(target_layer_ids=[2, 0]), "target_layer_ids must rise"),
    "ids-twice": (dict(target_layer_ids=[1, 1]), "target_layer_ids must rise"),
    "vocabulary-negative": (dict(draft_vocab_size=-1), "draft_vocab_size must be an integer"),
    "vocabulary-text": (dict(draft_vocab_size="all"), "draft_vocab_size must be an integer"),
    "steps-without-grid": (dict(num_steps=2), "no jump grid for 2 steps; choose one of 1, 3"),
    "steps-0": (dict(num_steps=0), "num_steps must be an integer"),
    "grids-list": (dict(jump_grids=[0, 1]), "jump_grids must be a non-empty object"),
    "grids-empty": (dict(jump_grids={}), "jump_grids must be a non-empty object"),
    "grid-key": (dict(jump_grids={"one": [0, 1]}), r"jump_grids\['one'\] must rise"),
    "grid-superscript": (dict(jump_grids={"²": [0, 0.5, 1]}), r"jump_grids\['²'\] must rise"),
    "grid-length": (dict(jump_grids={"1": [0, 0.5, 1]}), r"jump_grids\['1'\] must rise"),
    "grid-start": (dict(jump_grids={"1": [0.1, 1]}), r"jump_grids\['1'\] must rise"),
    "grid-end": (dict(jump_grids={"1": [0, 0.9]}), r"jump_grids\['1'\] must rise"),
    "grid-falls": (dict(jump_grids={"3": [0, 0.6, 0.5, 1]}), r"jump_grids\['3'\] must rise"),
    "grid-stands": (dict(jump_grids={"3": [0, 0.5, 0.5, 1]}), r"jump_grids\['3'\] must rise"),
    "grid-nan": (dict(jump_grids={"1": [0, float("nan")]}), r"jump_grids\['1'\] must rise"),
    "grid-text": (dict(jump_grids={"1": "01"}), r"jump_grids\['1'\] must rise"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_refused_configs(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(FlashMapConfigError, match=message):
        FlashMapConfig(**release_keys(**changes))
    # The same sentence reaches the user who starts a server with this file.
    with pytest.raises(FlashMapConfigError, match=message):
        read(tmp_path, release_keys(**changes))


BAD_FILES: dict[str, tuple[str, str]] = {
    "no-layer-ids": (
        json.dumps(release_keys(target_layer_ids=...)),
        "lacks target_layer_ids.* cannot be guessed; use the config.json of the release",
    ),
    "other-model": (json.dumps(dict(model_type="llama")), "holds a 'llama' model, not a FlashMap"),
    "no-model-type": (json.dumps(release_keys(model_type=...)), "has no model_type in its config"),
    "unknown-model": (json.dumps(dict(model_type="zzz")), "holds a 'zzz' model, not a FlashMap"),
    "other-type": (json.dumps(release_keys(dtype="float99")), "config.json could not be read"),
    "truncated": (
        json.dumps(release_keys())[:-9],
        "is not readable JSON .*; fetch the draft again",
    ),
    "empty": ("", "is not readable JSON"),
    "list": ("[]", "is not a JSON object; fetch the draft again"),
}


@pytest.mark.parametrize("text, message", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_config_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, text)
    assert str(tmp_path) in str(caught.value)


def test_folders_without_a_config(tmp_path: Path) -> None:
    def read_folder(path: Path) -> None:
        read_draft_config(
            SimpleNamespace(
                speculative_draft_model_path=str(path), speculative_draft_model_revision=None
            )
        )

    with pytest.raises(ValueError, match="missing does not exist; pass a FlashMap release folder"):
        read_folder(tmp_path / "missing")
    with pytest.raises(ValueError, match="has no config.json; pass a FlashMap release folder"):
        read_folder(tmp_path)


def test_no_remote_code_is_run(tmp_path: Path) -> None:
    """A folder's own code is left alone, even where the target's may run."""
    planted = tmp_path / "ran"
    folder = write_release(tmp_path / "draft", auto_map={"AutoConfig": "configuration.Config"})
    (folder / "configuration.py").write_text(f"open({str(planted)!r}, 'w')")
    draft = SimpleNamespace(
        speculative_draft_model_path=str(folder), speculative_draft_model_revision=None
    )
    assert isinstance(read_draft_config(draft), FlashMapConfig) and not planted.exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(hidden_size=48), "target with target_hidden_size 32 .* served target has 48"),
        (dict(vocab_size=60 + 64), "target with vocab_size 60 .* served target has 124"),
        (dict(num_hidden_layers=4), r"outputs of target layers \[3\] .* of layers 0 to 2 can"),
        (dict(num_hidden_layers=1), r"outputs of target layers \[0, 2, 3\]"),
    ],
    ids=["hidden-size", "vocabulary", "last-layer", "few-layers"],
)
def test_a_draft_of_another_target_is_refused(changes: dict, message: str) -> None:
    config = FlashMapConfig(**release_keys())
    fitting = dict(hidden_size=32, vocab_size=60, num_hidden_layers=5)
    config.validate_for_target(**fitting)
    with pytest.raises(FlashMapConfigError, match=message + ".*serve a draft trained for this"):
        config.validate_for_target(**fitting | changes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
own_keys = st.sampled_from(sorted(release_keys() | dict(head_dim=8, num_key_value_heads=2)))
foreign_keys = st.sampled_from(["dtype", "num_labels", "rope_scaling", "quantization_config"])
any_object = st.dictionaries(
    st.text(max_size=12) | own_keys | foreign_keys, json_values, max_size=6
)
quiet = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def assert_config_or_sentence(folder: Path, content: dict) -> None:
    try:
        config = read(folder, content)
    except ValueError as error:  # FlashMapConfigError included
        assert re.search("FlashMap|draft", str(error))
        return
    # Whatever is accepted can be used by all that reads it.
    assert isinstance(config, FlashMapConfig)
    assert config.grid()[-1] == 1
    assert all(min(shape) > 0 for shape in expected_shapes(config).values())
    config.validate_for_target(
        hidden_size=config.target_hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=max(config.target_layer_ids) + 2,
    )


@quiet
@given(changes=st.dictionaries(own_keys, json_values | st.just(...), min_size=1, max_size=3))
def test_any_change_to_a_release_is_served_or_refused(tmp_path: Path, changes: dict) -> None:
    assert_config_or_sentence(tmp_path, release_keys(**changes))


@quiet
@given(content=any_object)
def test_any_object_is_served_or_refused(tmp_path: Path, content: dict) -> None:
    assert_config_or_sentence(tmp_path, {"model_type": "flashmap"} | content)
