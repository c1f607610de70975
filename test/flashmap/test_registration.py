"""FLASHMAP as sglang sees it: algorithm, flags, config, model, and the sizes that follow."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from release_folder import release_keys, write_release
from sglang.srt.arg_groups.fields.flashmap import FlashMapSpecFields
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.runtime_context import get_context, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import spec_registry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

FLASHMAP = SpeculativeAlgorithm.FLASHMAP


@pytest.mark.parametrize("name", ["FLASHMAP", "flashmap", "FlashMap"])
def test_the_name_resolves(name: str) -> None:
    assert SpeculativeAlgorithm.from_string(name) is FLASHMAP


def test_flashmap_is_a_block_drafter_and_nothing_else() -> None:
    predicates = {name for name in vars(SpeculativeAlgorithm) if name.startswith("is_")}
    true = {name for name in predicates if getattr(FLASHMAP, name)()}
    assert true == {"is_flashmap", "is_dflash_family", "is_some", "is_speculative"}
    others = [algorithm for algorithm in SpeculativeAlgorithm if algorithm is not FLASHMAP]
    assert not any(algorithm.is_flashmap() for algorithm in others)


def test_what_the_scheduler_may_expect() -> None:
    supported = {
        name: getattr(FLASHMAP, name)()
        for name in vars(SpeculativeAlgorithm)
        if name.startswith("supports_")
    }
    assert supported == {
        "supports_target_verify_for_draft": True,
        "supports_prefill_shared_read_done": True,
        "supports_grammar_overlap": True,
        "supports_mixed_chunk": True,
        "supports_ragged_verify": False,
    }
    assert not FLASHMAP.carries_draft_hidden_states() and not FLASHMAP.need_topk()
    for is_draft_worker in (False, True):
        assert FLASHMAP.get_num_tokens_per_req_for_target_verify(17, is_draft_worker) == 17


def test_forward_pass_metrics_have_its_steps() -> None:
    from sglang.srt.managers.scheduler_components import metrics_reporter

    assert FLASHMAP in metrics_reporter._SPEC_DECODE_SNAPSHOT_ALGORITHMS


def test_the_worker() -> None:
    from sglang.srt.speculative.flashmap.worker import FlashMapWorker

    assert FLASHMAP.create_worker(ServerArgs(model_path="dummy")) is FlashMapWorker


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(spec_registry._REGISTRY)
    yield
    spec_registry._REGISTRY.clear()
    spec_registry._REGISTRY.update(before)


def test_a_registered_algorithm_still_registers(registry: None) -> None:
    """Every predicate that FLASHMAP adds must exist on registered algorithms too."""
    SpeculativeAlgorithm.register("MINE")(lambda server_args: object)
    mine = SpeculativeAlgorithm.from_string("mine")
    assert isinstance(mine, spec_registry.CustomSpecAlgo) and mine.is_flashmap() is False


def test_the_name_is_reserved(registry: None) -> None:
    with pytest.raises(ValueError, match="'FLASHMAP' is a reserved"):
        SpeculativeAlgorithm.register("flashmap")


def test_flags_parse() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    command = ["--model-path", "m", "--speculative-algorithm", "FLASHMAP"]
    args = ServerArgs.from_cli_args(parser.parse_args(command))
    assert args.speculative_flashmap_num_steps is None
    assert args.speculative_flashmap_draft_vocab_size is None
    command += ["--speculative-flashmap-num-steps", "3"]
    command += ["--speculative-flashmap-draft-vocab-size", "32768"]
    args = ServerArgs.from_cli_args(parser.parse_args(command))
    assert args.speculative_flashmap_num_steps == 3
    assert args.speculative_flashmap_draft_vocab_size == 32768
    help_text = " ".join(parser.format_help().split())
    # Verify attention is for other algorithms too.
    assert help_text.count("FLASHMAP only") == len(FlashMapSpecFields.__struct_fields__) - 1
    assert "UNO, FLASHMAP" in help_text
    with pytest.raises(SystemExit):
        parser.parse_args([*command[:4], "--speculative-flashmap-num-steps", "two"])


def test_published_settings_are_read_from_the_spec_namespace() -> None:
    fields = dict(speculative_algorithm="FLASHMAP", speculative_flashmap_num_steps=3)
    with get_context().override_server_args(**fields):
        assert get_spec().speculative_flashmap_num_steps == 3
        assert get_spec().speculative_flashmap_draft_vocab_size is None


def test_upstreams_fields_keep_their_positions() -> None:
    """The first positional arguments of `ServerArgs` are upstream's; ours are only appended."""
    from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER

    names = ServerArgs.__struct_fields__
    assert tuple(names[: len(POSITIONAL_FIELD_ORDER)]) == tuple(POSITIONAL_FIELD_ORDER)


def test_a_release_is_read_without_remote_code(tmp_path: Path) -> None:
    import flashmap  # noqa: F401 registers a config class of its own for the model type
    from sglang.srt.utils.hf_transformers_utils import get_config

    folder = write_release(tmp_path / "draft")
    config = get_config(str(folder), trust_remote_code=False)
    assert type(config) is FlashMapConfig
    assert config.target_layer_ids == release_keys()["target_layer_ids"]


def test_the_model_of_a_release() -> None:
    """sglang's registry maps each EntryClass's name to it; a release names it in config.json."""
    from sglang.srt.models import flashmap

    (entry,) = flashmap.EntryClass
    assert [entry.__name__] == release_keys()["architectures"]


def test_target_layers_and_sizes_that_upstream_reads_of_the_draft(tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    folder = write_release(tmp_path / "draft", max_position_embeddings=8)
    model_config = ModelConfig(str(folder), is_draft_model=True, context_length=4096)
    # What the draft's KV pool is sized from.
    assert model_config.num_hidden_layers == 2 and model_config.head_dim == 8
    assert model_config.num_attention_heads == model_config.num_key_value_heads == 2
    assert model_config.context_len == 4096
    draft = parse_dflash_draft_config(draft_hf_config=model_config.hf_config)
    keys = json.loads((folder / "config.json").read_text())
    assert draft.resolve_target_layer_ids(target_num_layers=5) == keys["target_layer_ids"]


SIZINGS = {
    "FLASHMAP-W17": dict(speculative_algorithm="FLASHMAP", speculative_num_draft_tokens=17),
    "FLASHMAP-W2": dict(speculative_algorithm="FLASHMAP", speculative_num_draft_tokens=2),
    "DFLASH-W16": dict(speculative_algorithm="DFLASH", speculative_num_draft_tokens=16),
    "NGRAM-W12": dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=12),
    "EAGLE-chain": dict(
        speculative_algorithm="EAGLE", speculative_num_draft_tokens=6, speculative_num_steps=5
    ),
    "EAGLE-tree": dict(
        speculative_algorithm="EAGLE",
        speculative_num_draft_tokens=8,
        speculative_num_steps=5,
        speculative_eagle_topk=4,
    ),
}


@pytest.mark.parametrize("page_size", [1, 16], ids=lambda n: f"page-{n}")
@pytest.mark.parametrize("fields", SIZINGS.values(), ids=SIZINGS)
def test_a_row_has_room_for_a_step_past_the_context_limit(fields: dict, page_size: int) -> None:
    """A request at the limit must not write into its neighbour's row of `req_to_token`."""
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_len_per_decode,
        get_alloc_reserve_per_decode,
        get_req_to_token_extra_context_len,
        page_aligned_decode_alloc_lens,
    )

    step = dict(speculative_num_steps=1, speculative_eagle_topk=1)
    with get_context().override_server_args(**step | fields, page_size=page_size):
        reserve = get_alloc_reserve_per_decode()
        extra = get_req_to_token_extra_context_len()
        assert reserve == 2 * get_alloc_len_per_decode()
        assert get_alloc_len_per_decode() >= fields["speculative_num_draft_tokens"]
        context_len = 64
        for committed in range(context_len - 2 * page_size, context_len + 1):
            _, allocated, _ = page_aligned_decode_alloc_lens(
                [request_at(committed)], reserve=reserve, page_size=page_size
            )
            assert allocated[0] <= context_len + extra


def request_at(committed: int) -> argparse.Namespace:
    kv = argparse.Namespace(kv_allocated_len=committed, kv_committed_len=committed)
    return argparse.Namespace(kv=kv)


def test_plain_decoding_keeps_upstreams_headroom() -> None:
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len

    with get_context().override_server_args(page_size=1):
        assert get_req_to_token_extra_context_len() == 4
