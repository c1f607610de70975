"""`--speculative-algorithm FLASHMAP` through upstream's argument resolution, without a server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from release_folder import VOCAB_FILE, WEIGHTS, edit, write_release, write_target
from sglang.srt.arg_groups import flashmap_hook
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `target` and `draft`."""
    root = tmp_path_factory.mktemp("models")
    write_target(root / "target")
    write_release(root / "draft")
    return root


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resolution sets variables for the processes it would start; no test may use a network."""
    before = dict(os.environ)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def resolve(folders: Path) -> Callable:
    """Resolves a command line; options in `flags` come last and win."""

    def run(flags: str = "", *, target: Path | None = None, draft: Path | str | None = None) -> Any:
        command = ["--model-path", str(target or folders / "target"), "--device", "cpu"]
        command += ["--speculative-algorithm", "FLASHMAP", "--mem-fraction-static", "0.1"]
        command += ["--speculative-draft-model-path", str(draft or folders / "draft")]
        server_args = prepare_server_args(command + flags.split())
        server_args.resolve_once()
        server_args.check_server_args()
        return resolved_view(server_args)

    return run


def test_defaults(resolve: Callable) -> None:
    view = resolve()
    assert view.speculative_algorithm == "FLASHMAP"
    assert view.speculative_num_draft_tokens == 5  # the anchor and half the block: a CPU
    assert view.speculative_num_steps == view.speculative_eagle_topk == 1
    assert view.speculative_flashmap_num_steps is view.speculative_flashmap_draft_vocab_size is None
    assert view.attention_backend == "torch_native"
    assert view.disable_overlap_schedule
    # Upstream's algorithms lower it to 48, which looks like a slow server under load.
    assert view.max_running_requests is None


@pytest.mark.parametrize("name", ["FLASHMAP", "flashmap", "FlashMap"])
def test_the_algorithms_name_in_any_case(resolve: Callable, name: str) -> None:
    view = resolve(f"--speculative-algorithm {name}")
    assert view.speculative_algorithm == "FLASHMAP" and view.speculative_num_draft_tokens == 5


ACCEPTED = {
    "narrowest": ("--speculative-num-draft-tokens 2", dict(speculative_num_draft_tokens=2)),
    "widest": ("--speculative-num-draft-tokens 9", dict(speculative_num_draft_tokens=9)),
    "one-step": ("--speculative-num-steps 1 --speculative-eagle-topk 1", {}),
    "3-jumps": ("--speculative-flashmap-num-steps 3", dict(speculative_flashmap_num_steps=3)),
    "vocabulary": (
        "--speculative-flashmap-draft-vocab-size 20",
        dict(speculative_flashmap_draft_vocab_size=20),
    ),
    "whole-vocabulary": ("--speculative-flashmap-draft-vocab-size 0", {}),
    "block-verification": (
        "--speculative-use-block-verification",
        dict(speculative_use_block_verification=True),
    ),
    "pages": ("--page-size 16", dict(page_size=16)),
    "quantized-target": (
        "--quantization fp8",
        dict(quantization="fp8", speculative_draft_model_quantization=None),
    ),
    # A draft is safetensors, however the target is stored.
    "pickled-target": ("--load-format pt", dict(speculative_draft_load_format="safetensors")),
    "trees": (
        "--speculative-flashmap-tree-candidates 4",
        dict(
            speculative_eagle_topk=2,
            speculative_num_draft_tokens=9,
            speculative_flashmap_tree_budget=32,
            speculative_flashmap_tree_temperature=0.3,
        ),
    ),
    "wide-trees": (
        "--speculative-flashmap-tree-candidates 4 --speculative-num-draft-tokens 33",
        dict(speculative_num_draft_tokens=33),
    ),
    "grown-trees": (
        "--speculative-flashmap-tree-candidates 1 --speculative-flashmap-tree-choices 8 "
        "--speculative-num-draft-tokens 33",
        dict(
            speculative_eagle_topk=2,
            speculative_num_draft_tokens=33,
            speculative_flashmap_tree_temperature=0.3,
        ),
    ),
    "grown-trees-and-chains": (
        "--speculative-flashmap-tree-candidates 1 --speculative-flashmap-tree-choices 8 "
        "--speculative-use-block-verification",
        dict(speculative_num_draft_tokens=9, speculative_flashmap_tree_temperature=0.8),
    ),
    "trees-of-cold-requests": (
        "--speculative-flashmap-tree-candidates 1 --speculative-flashmap-tree-choices 8 "
        "--speculative-flashmap-tree-temperature 0.1",
        dict(speculative_flashmap_tree_temperature=0.1),
    ),
    "one-candidate": (
        "--speculative-flashmap-tree-candidates 1",
        dict(speculative_eagle_topk=1, speculative_num_draft_tokens=5),
    ),
    "width": ("--speculative-flashmap-verify-width 7", dict(speculative_num_draft_tokens=7)),
    "width-twice": (
        "--speculative-flashmap-verify-width 5 --speculative-num-draft-tokens 5",
        dict(speculative_num_draft_tokens=5),
    ),
    "width-auto": (
        "--speculative-flashmap-verify-width auto --speculative-num-draft-tokens 4",
        dict(speculative_num_draft_tokens=4),
    ),
    "cache": (
        "--kv-cache-dtype bfloat16",
        dict(kv_cache_dtype="bfloat16", speculative_draft_kv_cache_dtype="auto"),
    ),
    "draft-cache": (
        "--speculative-draft-kv-cache-dtype bfloat16",
        dict(speculative_draft_kv_cache_dtype="bfloat16"),
    ),
    "adapters": ("--enable-lora --max-lora-rank 8 --lora-target-modules all", {}),
    "mixed-chunks": ("--enable-mixed-chunk", dict(enable_mixed_chunk=True)),
    "unquantized-draft": ("--speculative-draft-model-quantization unquant", {}),
}


@pytest.mark.parametrize("flags, resolved", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_flags(resolve: Callable, flags: str, resolved: dict) -> None:
    view = resolve(flags)
    for name, value in resolved.items():
        assert getattr(view, name) == value


LEAVE_OUT = "leave it out, or serve with another --speculative-algorithm"
UNSUPPORTED = [
    "--tp-size 2",
    "--pp-size 2",
    "--enable-dp-attention",
    "--disaggregation-mode prefill",
    "--enable-hierarchical-cache",
    "--enable-unified-memory",
    "--enable-two-batch-overlap",
    "--enable-pdmux",
    "--model-impl transformers",
    "--speculative-adaptive",
    "--speculative-token-map map.pt",
    "--speculative-draft-window-size 64",
    "--speculative-draft-model-quantization fp8",
    "--speculative-draft-attention-backend triton",
    "--speculative-dflash-block-size 4",
    "--speculative-accept-threshold-single 0.9",
]


@pytest.mark.parametrize("flag", UNSUPPORTED, ids=lambda flag: flag.split()[0][2:])
def test_unsupported_flags(resolve: Callable, flag: str) -> None:
    with pytest.raises(
        ValueError, match=f"FLASHMAP does not support {flag.split()[0]}.*{LEAVE_OUT}"
    ):
        resolve(flag)


def test_all_unsupported_flags_are_named_at_once(resolve: Callable) -> None:
    with pytest.raises(
        ValueError, match="--enable-pdmux, --speculative-token-map; leave them"
    ):
        resolve("--speculative-token-map map.pt --enable-pdmux")


REFUSED = {
    "accept-threshold": ("--speculative-accept-threshold-acc 0.9", "would make the output lossy"),
    "pickled-draft": (
        "--speculative-draft-load-format pt",
        "from safetensors files only: leave out --speculative-draft-load-format pt",
    ),
    "num-steps": ("--speculative-num-steps 3", "leave out --speculative-num-steps 3"),
    "topk": ("--speculative-eagle-topk 4", "leave out --speculative-eagle-topk 4"),
    "width-1": (
        "--speculative-num-draft-tokens 1",
        "must be from 2 to 9 for this draft's block size 8",
    ),
    "width-10": ("--speculative-num-draft-tokens 10", "--speculative-num-draft-tokens 10 .*2 to 9"),
    "width-wide": (
        "--speculative-flashmap-verify-width 10",
        "--speculative-flashmap-verify-width 10 .*2 to 9",
    ),
    "width-word": ("--speculative-flashmap-verify-width wide", "wide must be 'auto' or a number"),
    "two-widths": (
        "--speculative-flashmap-verify-width 5 --speculative-num-draft-tokens 6",
        "-num-draft-tokens 6 and .*-verify-width 5 are two names of one number; leave one out",
    ),
    "tree-width": (
        "--speculative-flashmap-tree-candidates 2 --speculative-num-draft-tokens 18",
        "must be from 2 to 17 for 2 candidates of block size 8",
    ),
    "tree-width-129": (
        "--speculative-flashmap-tree-candidates 64 --speculative-num-draft-tokens 130",
        "must be from 2 to 129 for 64 candidates of block size 8",
    ),
    "candidates-65": ("--speculative-flashmap-tree-candidates 65", "must be from 0 .* to 64"),
    "candidates-negative": ("--speculative-flashmap-tree-candidates -1", "must be from 0 .* to 64"),
    "one-noise": (
        "--speculative-flashmap-tree-candidates 4 --speculative-flashmap-noise-temperature 0",
        "all candidates are one; leave one of the two out",
    ),
    "choices-without-trees": (
        "--speculative-flashmap-tree-choices 4",
        "-choices 4 is for trees; pass --speculative-flashmap-tree-candidates 1",
    ),
    "choices-65": (
        "--speculative-flashmap-tree-candidates 5 --speculative-flashmap-tree-choices 13",
        "-choices 13 times 5 candidates must be from 0 to 64",
    ),
    "choices-width": (
        "--speculative-flashmap-tree-candidates 1 --speculative-flashmap-tree-choices 4 "
        "--speculative-num-draft-tokens 130",
        "must be from 2 to 129 for this draft's block size 8",
    ),
    "budget": ("--speculative-flashmap-tree-budget 0", "-budget 0 must be at least 1"),
    "temperature": ("--speculative-flashmap-tree-temperature -1", "-1.0 must be at least 0"),
    "no-grid": (
        "--speculative-flashmap-num-steps 2",
        "--speculative-flashmap-num-steps 2: .* no jump grid for 2 steps; choose one of 1, 3",
    ),
    "0-jumps": ("--speculative-flashmap-num-steps 0", "no jump grid for 0 steps"),
    "vocabulary-negative": (
        "--speculative-flashmap-draft-vocab-size -1",
        r"draft-vocab-size -1 must be from 0 \(the whole vocabulary\) to 60",
    ),
    "folded-3-jumps": (
        "--speculative-flashmap-noise folded --speculative-flashmap-num-steps 3",
        "folded is for drafts of one jump, and this one takes 3",
    ),
    "error-1": ("--speculative-flashmap-noise-error 1", "noise-error 1.0 must be at least 0"),
    "error-cholesky": (
        "--speculative-flashmap-noise-error 0.01 --speculative-flashmap-noise cholesky",
        "noise-error 0.01 cuts the folded noise of one jump; leave it out",
    ),
    "draft-temperature-0": (
        "--speculative-flashmap-draft-temperature 0",
        "--speculative-flashmap-draft-temperature 0.0 must be above 0 and at most 2",
    ),
    "draft-temperature-2.1": (
        "--speculative-flashmap-draft-temperature 2.1",
        "draft-temperature 2.1 must be above 0 and at most 2",
    ),
    "draft-temperature-nan": (
        "--speculative-flashmap-draft-temperature nan",
        "draft-temperature nan must be above 0 and at most 2",
    ),
    "temperature-negative": (
        "--speculative-flashmap-noise-temperature -1",
        "noise-temperature -1.0 must be a number of at least 0",
    ),
    "fp8": (
        "--speculative-flashmap-draft-quantization fp8",
        "needs the FP8 tensor cores of an Ada, Hopper or later GPU, which --device cpu has not",
    ),
    "fp8-cache": (
        "--kv-cache-dtype fp8_e4m3",
        "--kv-cache-dtype fp8_e4m3 is for GPUs, and this is --device cpu; leave it out",
    ),
    "fp8-draft-cache": (
        "--speculative-draft-kv-cache-dtype fp8_e4m3",
        "--speculative-draft-kv-cache-dtype fp8_e4m3 is for GPUs",
    ),
    "bank-1-jump": (
        "--speculative-flashmap-jump-bank-size 64",
        "jump-bank-size 64 is for drafts of several jumps, and this one takes one; leave it out",
    ),
    "memory-saver": (
        "--enable-memory-saver",
        "pass --enable-weights-cpu-backup with --enable-memory-saver, or leave both out",
    ),
    "bank-negative": ("--speculative-flashmap-jump-bank-size -1", "must be at least 0"),
    "topk-0": (
        "--speculative-flashmap-jump-bank-size 64 --speculative-flashmap-jump-topk 0 "
        "--speculative-flashmap-num-steps 3",
        "jump-topk 0 must be from 1 to the 60 tokens of the draft vocabulary",
    ),
    "vocabulary-61": ("--speculative-flashmap-draft-vocab-size 61", "must be from 0 .* to 60"),
    "backend": (
        "--attention-backend triton",
        "cannot verify with --attention-backend triton on cpu; choose torch_native",
    ),
    "decode-backend": ("--decode-attention-backend flashinfer", "cannot verify with .* flashinfer"),
}


@pytest.mark.parametrize("flags, message", REFUSED.values(), ids=REFUSED)
def test_refused_values(resolve: Callable, flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(flags)


def test_gpus_have_caches_of_8_bits() -> None:
    fp8 = dict(kv_cache_dtype="fp8_e4m3", speculative_draft_kv_cache_dtype="fp8_e4m3")
    flashmap_hook._check_caches(SimpleNamespace(device="cuda:0", **fp8))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logit_processors_end_overlap(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read a request's output on the host, which overlap scheduling knows a step late."""
    declared: dict[str, Any] = {}
    view = SimpleNamespace(
        device=device, disable_overlap_schedule=False, enable_custom_logit_processor=True
    )
    monkeypatch.setattr(flashmap_hook, "resolving_view", lambda _: view)
    monkeypatch.setattr(flashmap_hook, "declare_resolution", lambda *_, **f: declared.update(f))
    flashmap_hook._resolve_schedule(None)
    assert declared == dict(disable_overlap_schedule=True)
    view.device, view.enable_custom_logit_processor = "cuda", False
    declared.clear()
    flashmap_hook._resolve_schedule(None)
    assert not declared


@pytest.mark.parametrize(
    "device, trees, block, width",
    [
        *(("cuda", False, 16, 16), ("cuda", True, 16, 16), ("cuda:0", False, 8, 8)),
        *(("cuda", False, 12, 13), ("cuda", False, 1, 2)),
        *(("cpu", False, 16, 5), ("cpu", False, 3, 4), ("cpu", True, 16, 17)),
    ],
)
def test_default_verify_width(device: str, trees: bool, block: int, width: int) -> None:
    cfg, config = SimpleNamespace(device=device), SimpleNamespace(block_size=block)
    assert flashmap_hook._default_verify_width(cfg, config, trees) == width


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmap_hook, "resolving_view", lambda _: SimpleNamespace(device="xpu:0"))
    with pytest.raises(ValueError, match="not on --device xpu:0; choose cuda or cpu"):
        flashmap_hook.handle_flashmap(None)


@pytest.mark.parametrize(
    "device, backend, fine",
    [
        ("cuda", "fa3", True),
        ("cuda:1", "triton", True),
        ("cuda", "flashinfer", True),
        ("cuda", "trtllm_mha", False),
        ("cuda", "torch_native", False),
        ("cpu", "torch_native", True),
        ("cpu", "intel_amx", False),
    ],
)
def test_attention_backends_that_verify(
    device: str, backend: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = SimpleNamespace(
        device=device,
        attention_backend=backend,
        prefill_attention_backend=None,
        decode_attention_backend=None,
    )
    monkeypatch.setattr(flashmap_hook, "resolved_view", lambda server_args: view)
    if fine:
        flashmap_hook._check_attention_backend(None)
        return
    with pytest.raises(ValueError, match=f"--attention-backend {backend} on {device}; choose "):
        flashmap_hook._check_attention_backend(None)


@pytest.mark.parametrize("device, fine", [("cuda", False), ("cpu", True)])
@pytest.mark.parametrize("window", [None, 64])
def test_trees_of_a_target_with_a_sliding_window(
    device: str, fine: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = SimpleNamespace(
        device=device,
        speculative_flashmap_tree_candidates=4,
        speculative_flashmap_tree_choices=0,
        speculative_flashmap_tree_budget=32,
        speculative_flashmap_tree_temperature=0.3,
        speculative_flashmap_noise_temperature=1.0,
    )
    model_config = SimpleNamespace(sliding_window_size=window)
    monkeypatch.setattr(flashmap_hook, "resolving_view", lambda _: cfg)
    monkeypatch.setattr(flashmap_hook, "model_config_of", lambda _: model_config)
    if fine or window is None:
        flashmap_hook._check_trees(None, SimpleNamespace(block_size=8))
        return
    with pytest.raises(
        ValueError, match="sliding window .64 tokens.*leave it out to verify chains"
    ):
        flashmap_hook._check_trees(None, SimpleNamespace(block_size=8))


TARGETS = {
    "hidden-size": (dict(hidden_size=64), "target_hidden_size 32 .* the served target has 64"),
    "vocabulary": (dict(vocab_size=124), "vocab_size 60 .* the served target has 124"),
    "layers": (dict(num_hidden_layers=4), r"outputs of target layers \[3\]"),
}


@pytest.mark.parametrize("changes, message", TARGETS.values(), ids=TARGETS)
def test_a_target_the_draft_was_not_made_for(
    resolve: Callable, tmp_path: Path, changes: dict, message: str
) -> None:
    target = write_target(tmp_path / "target", **changes)
    with pytest.raises(ValueError, match=message):
        resolve(target=target)


CONFIGS = {
    "flow": (dict(flow_map=False), "flow_map is false"),
    "grid": (dict(jump_grids={"1": [0, 2]}), r"jump_grids\['1'\] must rise"),
    "no-layer-ids": (dict(target_layer_ids=...), "lacks target_layer_ids"),
    "other-vocabulary": (dict(vocab_size=124), "vocab_size 124 .* the served target has 60"),
    "other-class": (
        dict(architectures=["Custom"]),
        r"names the architectures \['Custom'\], but a FlashMap draft is a FlashMapDraftModel",
    ),
    "more-layers": (dict(num_hidden_layers=3), "lacks layers.2"),
    "wider": (dict(intermediate_size=97), r"mlp.fc1.* has shape \(96.*asks for \(97"),
}


@pytest.mark.parametrize("changes, message", CONFIGS.values(), ids=CONFIGS)
def test_a_release_whose_config_does_not_fit(
    resolve: Callable, tmp_path: Path, changes: dict, message: str
) -> None:
    draft = write_release(tmp_path / "draft", **changes)
    with pytest.raises(ValueError, match=message):
        resolve(draft=draft)


def test_a_release_with_a_missing_tensor(resolve: Callable, tmp_path: Path) -> None:
    draft = write_release(tmp_path / "draft")
    edit(draft / WEIGHTS, lambda tensors: tensors.pop("head.bias"))
    with pytest.raises(ValueError, match="lacks head.bias"):
        resolve(draft=draft)
    resolve("--load-format dummy", draft=draft)
    resolve("--speculative-draft-load-format dummy", draft=draft)


def test_a_release_without_ranking(resolve: Callable, folders: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(folders / "draft", tmp_path / "draft"))
    (draft / VOCAB_FILE).unlink()
    resolve(draft=draft)
    resolve("--speculative-flashmap-draft-vocab-size 60", draft=draft)
    with pytest.raises(ValueError, match="pass --speculative-flashmap-draft-vocab-size 0"):
        resolve("--speculative-flashmap-draft-vocab-size 20", draft=draft)


def test_no_draft(folders: Path) -> None:
    command = f"--model-path {folders / 'target'} --device cpu --speculative-algorithm FLASHMAP"
    server_args = prepare_server_args(command.split())
    with pytest.raises(ValueError, match="needs a draft: pass --speculative-draft-model-path"):
        server_args.resolve_once()


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            "",
            dict(
                verify_width=5,
                grid=(0.0, 1.0),
                draft_vocab_size=0,
                draft_temperature=1.0,
                block_verification=False,
            ),
        ),
        ("--speculative-flashmap-draft-temperature 2", dict(draft_temperature=2.0)),
        (
            "--speculative-num-draft-tokens 4 --speculative-flashmap-num-steps 3 "
            "--speculative-flashmap-draft-vocab-size 20 --speculative-use-block-verification",
            dict(
                verify_width=4,
                grid=(0.0, 0.5, 0.75, 1.0),
                draft_vocab_size=20,
                block_verification=True,
            ),
        ),
        ("--speculative-flashmap-draft-vocab-size 60", dict(draft_vocab_size=0)),
        (
            "--speculative-flashmap-noise folded --speculative-flashmap-noise-error 0.01 "
            "--speculative-flashmap-noise-temperature 0.5",
            dict(noise="folded", noise_error=0.01, noise_temperature=0.5),
        ),
    ],
    ids=["defaults", "draft-temperature", "all", "every-token", "noise"],
)
def test_serve_config(resolve: Callable, folders: Path, flags: str, expected: dict) -> None:
    config = FlashMapConfig.from_pretrained(folders / "draft")
    serve = FlashMapServeConfig.from_spec(resolve(flags), config)
    assert serve.block_size == 8
    for name, value in expected.items():
        assert getattr(serve, name) == value
    assert serve.num_drafts == serve.verify_width - 1
    assert serve.jumps == list(zip(serve.grid[:-1], serve.grid[1:], strict=True))


def test_the_checkpoints_own_draft_vocabulary(resolve: Callable, tmp_path: Path) -> None:
    draft = write_release(tmp_path / "draft", draft_vocab_size=25)
    config = FlashMapConfig.from_pretrained(draft)
    for flags, size in (
        ("", 25),
        ("--speculative-flashmap-draft-vocab-size 0", 0),
        ("--speculative-flashmap-draft-vocab-size 10", 10),
    ):
        serve = FlashMapServeConfig.from_spec(resolve(flags, draft=draft), config)
        assert serve.draft_vocab_size == size


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


BROKEN_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "draft does not exist; pass a FlashMap release folder or"),
    "no-config": (lambda folder: (folder / "config.json").unlink(), "draft has no config.json"),
    "broken-config": (break_config, "is not readable JSON .*; fetch the draft again"),
    "other-model": (
        lambda folder: shutil.copy(folder.parent / "target" / "config.json", folder),
        "holds a 'llama' model, not a FlashMap draft",
    ),
    "no-weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no model.safetensors"),
}


@pytest.mark.parametrize("damage, message", BROKEN_FOLDERS.values(), ids=BROKEN_FOLDERS)
def test_broken_folders(resolve: Callable, tmp_path: Path, damage: Callable, message: str) -> None:
    write_target(tmp_path / "target")
    draft = write_release(tmp_path / "draft")
    damage(draft)
    with pytest.raises(ValueError, match=message) as caught:
        resolve(draft=draft)
    assert str(draft) in str(caught.value)


def test_a_repository_that_cannot_be_reached(resolve: Callable) -> None:
    with pytest.raises(
        ValueError, match="someone/draft: .*check the network and the repository id"
    ):
        resolve(draft="someone/draft")


AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")


@pytest.mark.parametrize("flags", ["", "--trust-remote-code"], ids=["plain", "target-trusted"])
@pytest.mark.parametrize("architecture", ["FlashMapDraftModel", "Custom"])
def test_the_drafts_code_is_never_run(
    resolve: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    architecture: str,
) -> None:
    """Up to the class that upstream's loader takes, also where the user brings models."""
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "drafts")
    planted = tmp_path / "ran"
    auto_map = {name: "custom.Custom" for name in AUTO_CLASSES}
    draft = write_release(tmp_path / "draft", auto_map=auto_map, architectures=[architecture])
    (draft / "custom.py").write_text(f"open({str(planted)!r}, 'w')")
    view = resolve(flags, draft=draft)
    read = ModelConfig.from_server_args(view, model_path=str(draft), is_draft_model=True)
    if architecture == "Custom":
        with pytest.raises(ValueError, match="'Custom' is not a registered model"):
            get_model_architecture(read)
    else:
        assert get_model_architecture(read)[1] == architecture
    assert not planted.exists()
