"""Resolve and validate the server arguments of ``--speculative-algorithm FLASHMAP``.

One flat pass before any weight is loaded: what FLASHMAP cannot honour is refused in one sentence
that names the flag and the way out; what is left open is resolved from the draft's config. The
draft folder's tensors are checked from file headers here too, when the folder is local.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from sglang.kernels.ops.speculative.flashmap.tree import MAX_CANDIDATES, MAX_SLOTS, MAX_WIDTH
from sglang.kernels.ops.speculative.flashmap.tree_growth import MAX_CHOICES
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
)
from sglang.srt.arg_groups.refusal import StartRefused
from sglang.srt.configs.flashmap import FlashMapConfig, FlashMapConfigError
from sglang.srt.environ import envs
from sglang.srt.speculative.flashmap.checkpoint import check_folder
from sglang.srt.speculative.flashmap.config import resolve_draft_vocab_size

logger = logging.getLogger(__name__)

# Backends that verify chains and trees of drafts, by device.
VERIFY_BACKENDS = {"cuda": ("fa3", "flashinfer", "triton"), "cpu": ("torch_native",)}
# Default verify width of chains on a CPU, and what it is a multiple of on a GPU if that takes no
# more than one draft; docs/benchmarks.md has the measurements.
CPU_VERIFY_WIDTH, GPU_ROWS = 5, 8
# Of a draft: these read safetensors files, and nothing else of its folder.
DRAFT_LOAD_FORMATS = ("safetensors", "fastsafetensors", "instanttensor", "dummy")


def handle_flashmap(server_args: Any) -> None:
    """Validate ``server_args`` and declare ``W`` and the branches of a step, or
    ``StartRefused``."""
    try:
        _handle_flashmap(server_args)
    except ValueError as error:
        raise StartRefused(str(error)) from error


def _handle_flashmap(server_args: Any) -> None:
    cfg = resolving_view(server_args)
    _refuse_unsupported(server_args)
    config = read_draft_config(cfg)
    _check_architecture(cfg, config)
    _check_target(server_args, config)
    _check_trees(server_args, config)
    width = _resolve_verify_width(server_args, config)
    grid = config.grid(cfg.speculative_flashmap_num_steps)
    _check_noise(cfg, num_jumps=len(grid) - 1)
    _check_draft_temperature(cfg)
    _check_jump_bank(cfg, config, num_jumps=len(grid) - 1)
    _check_quantization(cfg)
    _check_caches(cfg)
    load_format = _resolve_load_format(cfg)
    _check_folder(cfg, config, load_format)
    declare_resolution(
        server_args,
        "handle_flashmap",
        speculative_num_steps=1,
        # To attention backends and graphs, above 1 is what says that verify inputs carry a tree's
        # mask.
        speculative_eagle_topk=2 if _verifies_trees(cfg) else 1,
        speculative_num_draft_tokens=width,
        speculative_flashmap_tree_temperature=_tree_temperature(cfg),
        speculative_draft_load_format=load_format,
        # The draft's own, whatever the target's is: 8 bits cost accepted drafts.
        speculative_draft_kv_cache_dtype=cfg.speculative_draft_kv_cache_dtype or "auto",
        # Unless asked for, the target's --quantization has become the draft's.
        speculative_draft_model_quantization=None,
    )
    _check_attention_backend(server_args)
    _resolve_schedule(server_args)


def _refuse_unsupported(server_args: Any) -> None:
    cfg = resolving_view(server_args)
    device = str(cfg.device).split(":")[0]
    if device not in VERIFY_BACKENDS:
        raise ValueError(
            f"FLASHMAP runs on CUDA GPUs and CPUs, not on --device {cfg.device}; choose cuda or "
            "cpu."
        )
    if cfg.speculative_draft_model_path is None:
        raise ValueError(
            "FLASHMAP needs a draft: pass --speculative-draft-model-path with a FlashMap release "
            "(j-shen/FlashMap-Qwen3-8B for Qwen/Qwen3-8B) or a folder made by "
            "scripts/make_draft.py."
        )
    unsupported = {
        "--tp-size above 1": cfg.tp_size > 1,
        "--pp-size above 1": cfg.pp_size > 1,
        # As given: resolution has switched it off or taken it over.
        "--enable-dp-attention": bool(server_args.enable_dp_attention),
        "--disaggregation-mode": cfg.disaggregation_mode not in (None, "null"),
        "--enable-hierarchical-cache": bool(cfg.enable_hierarchical_cache),
        "--enable-unified-memory": bool(cfg.enable_unified_memory),
        "--enable-two-batch-overlap": bool(cfg.enable_two_batch_overlap),
        "--enable-pdmux": bool(cfg.enable_pdmux),
        "--model-impl transformers": cfg.model_impl == "transformers",
        "--speculative-adaptive": bool(server_args.speculative_adaptive),
        "--speculative-token-map": cfg.speculative_token_map is not None,
        "--speculative-draft-window-size": cfg.speculative_draft_window_size is not None,
        "--speculative-draft-model-quantization": server_args.speculative_draft_model_quantization
        not in (None, "unquant"),
        "--speculative-draft-attention-backend": cfg.speculative_draft_attention_backend
        is not None,
        "--speculative-dflash-block-size": cfg.speculative_dflash_block_size is not None,
        "--speculative-accept-threshold-single and -acc other than 1.0, which would make the "
        "output lossy": cfg.speculative_accept_threshold_single != 1.0
        or cfg.speculative_accept_threshold_acc != 1.0,
    }
    asked = [name for name, given in unsupported.items() if given]
    if asked:
        raise ValueError(
            f"FLASHMAP does not support {', '.join(asked)}; leave "
            f"{'it' if len(asked) == 1 else 'them'} out, or serve with another "
            "--speculative-algorithm."
        )
    if cfg.enable_memory_saver and not cfg.enable_weights_cpu_backup:
        raise ValueError(
            "FLASHMAP cannot take new weights, which a release of the memory would call for: pass "
            "--enable-weights-cpu-backup with --enable-memory-saver, or leave both out."
        )
    if cfg.speculative_num_steps not in (None, 1):
        raise ValueError(
            f"FLASHMAP drafts a block in one pass: leave out --speculative-num-steps "
            f"{cfg.speculative_num_steps} (jumps are --speculative-flashmap-num-steps)."
        )
    # As given: a resolved one may be ours.
    if server_args.speculative_eagle_topk not in (None, 1):
        raise ValueError(
            f"FLASHMAP does not branch by token: leave out --speculative-eagle-topk "
            f"{server_args.speculative_eagle_topk} (trees are "
            "--speculative-flashmap-tree-candidates)."
        )


def read_draft_config(cfg: Any) -> FlashMapConfig:
    """The draft's validated config; ``ValueError`` with one sentence otherwise.

    Read by our class itself: whichever class transformers' registry holds for the model type (the
    flashmap package puts its own there), and never by code of the draft's folder.
    """
    path = cfg.speculative_draft_model_path
    if os.path.isabs(path) and not os.path.isdir(path):
        raise ValueError(
            f"--speculative-draft-model-path {path} does not exist; pass a FlashMap release folder "
            "or a Hugging Face repository id."
        )
    if os.path.isdir(path):
        _check_config_file(Path(path))
    revision = cfg.speculative_draft_model_revision
    try:
        model_type = FlashMapConfig.get_config_dict(path, revision=revision)[0].get("model_type")
        if model_type == FlashMapConfig.model_type:
            return FlashMapConfig.from_pretrained(path, revision=revision)
    except FlashMapConfigError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"--speculative-draft-model-path {path}: its config.json could not be read ({reason}); "
            "pass a FlashMap release folder or check the network and the repository id."
        ) from error
    found = (
        f"holds a {model_type!r} model" if model_type else "has no model_type in its config.json"
    )
    raise ValueError(
        f"--speculative-draft-model-path {path} {found}, not a FlashMap draft; pass a FlashMap "
        "release, or the --speculative-algorithm of that draft."
    )


def _check_config_file(folder: Path) -> None:
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(
            f"--speculative-draft-model-path {folder} has no config.json; pass a FlashMap release "
            "folder."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not readable JSON ({error}); fetch the draft again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; fetch the draft again.")
    model_type = content.get("model_type")
    if model_type == FlashMapConfig.model_type and "target_layer_ids" not in content:
        # The class default is the Qwen3-8B release's; for another target it would be a guess.
        raise ValueError(
            f"{path} lacks target_layer_ids, the target layers the draft reads, which cannot be "
            "guessed; use the config.json of the release."
        )


def _check_target(server_args: Any, config: FlashMapConfig) -> None:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model_config = model_config_of(server_args)
    text = model_config.hf_text_config
    config.validate_for_target(
        hidden_size=int(text.hidden_size),
        vocab_size=int(model_config.vocab_size),
        num_hidden_layers=int(text.num_hidden_layers),
    )
    if mambaish_config(model_config) is not None:
        raise ValueError(
            "FLASHMAP does not support targets with recurrent (Mamba or linear attention) layers; "
            "serve this target with another --speculative-algorithm."
        )


def _verifies_trees(cfg: Any) -> bool:
    least = 1 if cfg.speculative_flashmap_tree_choices else 2
    return cfg.speculative_flashmap_tree_candidates >= least


def _tree_temperature(cfg: Any) -> float:
    """Of the flag, or up to which matching is accepted longest by docs/benchmarks.md: longer than
    trees of draws, or than chains where hotter requests get those."""
    given = cfg.speculative_flashmap_tree_temperature
    if given is not None:
        return given
    grown_or_chains = (
        cfg.speculative_flashmap_tree_choices and cfg.speculative_use_block_verification
    )
    return 0.8 if grown_or_chains else 0.3


def _check_trees(server_args: Any, config: FlashMapConfig) -> None:
    cfg = resolving_view(server_args)
    candidates = cfg.speculative_flashmap_tree_candidates
    if not 0 <= candidates <= MAX_CANDIDATES:
        raise ValueError(
            f"--speculative-flashmap-tree-candidates {candidates} must be from 0 (chains) to "
            f"{MAX_CANDIDATES}."
        )
    if cfg.speculative_flashmap_tree_budget < 1:
        raise ValueError(
            f"--speculative-flashmap-tree-budget {cfg.speculative_flashmap_tree_budget} must be at "
            "least 1: every request drafts one block."
        )
    if not _tree_temperature(cfg) >= 0:
        raise ValueError(
            "--speculative-flashmap-tree-temperature "
            f"{cfg.speculative_flashmap_tree_temperature} must be at least 0 (only greedy requests "
            "get trees)."
        )
    choices = cfg.speculative_flashmap_tree_choices
    if choices < 0 or choices * candidates > MAX_CHOICES:
        raise ValueError(
            f"--speculative-flashmap-tree-choices {choices} times {candidates} candidates must be "
            f"from 0 to {MAX_CHOICES} tokens of a slot."
        )
    if choices and not candidates:
        raise ValueError(
            f"--speculative-flashmap-tree-choices {choices} is for trees; pass "
            "--speculative-flashmap-tree-candidates 1 (or more) too."
        )
    if not _verifies_trees(cfg):
        return
    if cfg.speculative_flashmap_noise_temperature == 0:
        raise ValueError(
            f"--speculative-flashmap-tree-candidates {candidates}: with "
            "--speculative-flashmap-noise-temperature 0 all candidates are one; leave one of the "
            "two out."
        )
    if config.block_size > MAX_SLOTS:
        raise ValueError(
            f"--speculative-flashmap-tree-candidates {candidates}: trees are planned from blocks "
            f"of at most {MAX_SLOTS} tokens, and this draft's have {config.block_size}; leave it "
            "out to verify chains."
        )
    window = model_config_of(server_args).sliding_window_size
    if window is not None and window > 0 and not str(cfg.device).startswith("cpu"):
        raise ValueError(
            f"--speculative-flashmap-tree-candidates {candidates}: attention backends measure a "
            f"sliding window ({window} tokens in this target) between tree nodes, not positions; "
            "leave it out to verify chains."
        )


def _resolve_verify_width(server_args: Any, config: FlashMapConfig) -> int:
    """``W``: the anchor and the drafts verified, ``_default_verify_width`` unless asked for."""
    cfg = resolving_view(server_args)
    flags = {"--speculative-num-draft-tokens": server_args.speculative_num_draft_tokens}
    own = cfg.speculative_flashmap_verify_width
    if own != "auto":
        if not own.isdecimal():
            raise ValueError(
                f"--speculative-flashmap-verify-width {own} must be 'auto' or a number of rows."
            )
        flags["--speculative-flashmap-verify-width"] = int(own)
    asked = {flag: int(width) for flag, width in flags.items() if width is not None}
    if len(set(asked.values())) > 1:
        raise ValueError(
            " and ".join(f"{flag} {width}" for flag, width in asked.items())
            + " are two names of one number; leave one out."
        )
    candidates = max(1, cfg.speculative_flashmap_tree_candidates)
    trees, grown = _verifies_trees(cfg), cfg.speculative_flashmap_tree_choices > 0
    most = MAX_WIDTH if grown else candidates * config.block_size + 1
    if trees:
        most = min(most, MAX_WIDTH)
    for flag, width in asked.items():
        if not 2 <= width <= most:
            blocks = f"{candidates} candidates of" if candidates > 1 else "this draft's"
            raise ValueError(
                f"{flag} {width} (the verify width, one more than the drafts verified) must be "
                f"from 2 to {most} for {blocks} block size {config.block_size}."
            )
        return width
    return _default_verify_width(cfg, config, trees)


def _default_verify_width(cfg: Any, config: FlashMapConfig, trees: bool) -> int:
    """``K + 1``, or a little less: a GPU multiplies rows and heads in tiles that ``K`` rows fill
    and one more would spill over; on a CPU no row of a verify forward is free."""
    whole = config.block_size + 1
    if cfg.device == "cpu":
        width = whole if trees else min(whole, CPU_VERIFY_WIDTH)
    else:
        width = whole - 1 if config.block_size % GPU_ROWS == 0 else whole
    if width < whole:
        logger.info(
            "FLASHMAP: on a %s %d of %d drafts are verified a step; "
            "--speculative-num-draft-tokens %d verifies all.",
            *("CPU" if cfg.device == "cpu" else "GPU", width - 1, config.block_size, whole),
        )
    return width


def _check_architecture(cfg: Any, config: FlashMapConfig) -> None:
    """Refuse a draft that names another model class than ours, unless the user brings models."""
    if (
        config.architectures != ["FlashMapDraftModel"]
        and not envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get()
    ):
        raise ValueError(
            f"--speculative-draft-model-path {cfg.speculative_draft_model_path}: its config.json "
            f"names the architectures {config.architectures}, but a FlashMap draft is a "
            "FlashMapDraftModel; use the config.json of the release."
        )


def _resolve_load_format(cfg: Any) -> str:
    """How the draft is loaded, which the target's ``--load-format`` does not decide."""
    asked = cfg.speculative_draft_load_format
    if asked in (None, "auto"):
        return "dummy" if asked is None and cfg.load_format == "dummy" else "safetensors"
    if asked not in DRAFT_LOAD_FORMATS:
        raise ValueError(
            f"FLASHMAP reads drafts from safetensors files only: leave out "
            f"--speculative-draft-load-format {asked}."
        )
    return asked


def _check_jump_bank(cfg: Any, config: FlashMapConfig, *, num_jumps: int) -> None:
    size, topk = cfg.speculative_flashmap_jump_bank_size, cfg.speculative_flashmap_jump_topk
    if size < 0:
        raise ValueError(
            f"--speculative-flashmap-jump-bank-size {size} must be at least 0 (no bank)."
        )
    if size and num_jumps == 1:
        raise ValueError(
            f"--speculative-flashmap-jump-bank-size {size} is for drafts of several jumps, and "
            "this one takes one; leave it out, or pass --speculative-flashmap-num-steps."
        )
    asked = cfg.speculative_flashmap_draft_vocab_size
    most = resolve_draft_vocab_size(asked, config) or config.vocab_size
    if size and not 1 <= topk <= most:
        raise ValueError(
            f"--speculative-flashmap-jump-topk {topk} must be from 1 to the {most} tokens of the "
            "draft vocabulary."
        )


def _check_quantization(cfg: Any) -> None:
    if cfg.speculative_flashmap_draft_quantization == "none":
        return
    found = f"--device {cfg.device}"
    if str(cfg.device).startswith("cuda"):
        found = torch.cuda.get_device_name()
        if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9):
            return
    raise ValueError(
        "--speculative-flashmap-draft-quantization fp8 needs the FP8 tensor cores of an Ada, "
        f"Hopper or later GPU, which {found} has not; leave it out."
    )


def _check_caches(cfg: Any) -> None:
    """Of 8 bits and fewer there is no attention on a CPU."""
    if not str(cfg.device).startswith("cpu"):
        return
    for name in ("kv_cache_dtype", "speculative_draft_kv_cache_dtype"):
        dtype = getattr(cfg, name)
        if dtype is not None and dtype.startswith(("fp8", "fp4", "int")):
            raise ValueError(
                f"--{name.replace('_', '-')} {dtype} is for GPUs, and this is --device cpu; leave "
                "it out."
            )


def _check_noise(cfg: Any, *, num_jumps: int) -> None:
    form, error = cfg.speculative_flashmap_noise, cfg.speculative_flashmap_noise_error
    temperature = cfg.speculative_flashmap_noise_temperature
    if form == "folded" and num_jumps > 1:
        raise ValueError(
            f"--speculative-flashmap-noise folded is for drafts of one jump, and this one takes "
            f"{num_jumps}; leave it out, or pass --speculative-flashmap-num-steps 1."
        )
    if not 0 <= error < 1:
        raise ValueError(
            f"--speculative-flashmap-noise-error {error} must be at least 0 (no cut) and below 1."
        )
    if error > 0 and (form == "cholesky" or num_jumps > 1):
        raise ValueError(
            f"--speculative-flashmap-noise-error {error} cuts the folded noise of one jump; leave "
            "it out, or pass --speculative-flashmap-noise folded and "
            "--speculative-flashmap-num-steps 1."
        )
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"--speculative-flashmap-noise-temperature {temperature} must be a number of at least "
            "0."
        )


def _check_draft_temperature(cfg: Any) -> None:
    factor = cfg.speculative_flashmap_draft_temperature
    if not 0 < factor <= 2:
        raise ValueError(
            f"--speculative-flashmap-draft-temperature {factor} must be above 0 and at most 2; 1, "
            "the default, draws drafts at the request's own temperature."
        )


def _check_folder(cfg: Any, config: FlashMapConfig, load_format: str) -> None:
    size = cfg.speculative_flashmap_draft_vocab_size
    if size is not None and not 0 <= size <= config.vocab_size:
        raise ValueError(
            f"--speculative-flashmap-draft-vocab-size {size} must be from 0 (the whole vocabulary) "
            f"to {config.vocab_size}."
        )
    if load_format == "dummy":
        return
    folder = Path(cfg.speculative_draft_model_path)
    if folder.is_dir():
        check_folder(folder, config, draft_vocab_size=resolve_draft_vocab_size(size, config))


def _resolve_schedule(server_args: Any) -> None:
    cfg = resolving_view(server_args)
    if cfg.device == "cpu" and not cfg.disable_overlap_schedule:
        # There is no second stream to overlap with, and results would come a step late.
        declare_resolution(server_args, "handle_flashmap", disable_overlap_schedule=True)
    elif cfg.enable_custom_logit_processor and not cfg.disable_overlap_schedule:
        # They read a request's output on the host, which is complete only without overlap.
        declare_resolution(server_args, "handle_flashmap", disable_overlap_schedule=True)
        logger.info(
            "FLASHMAP: --enable-custom-logit-processor switches overlap scheduling off, since "
            "processors read each request's whole output."
        )


def _check_attention_backend(server_args: Any) -> None:
    view = resolved_view(server_args)
    device = str(view.device).split(":")[0]
    allowed = VERIFY_BACKENDS[device]
    for backend in attention_backends_of(view):
        if backend is not None and backend not in allowed:
            raise ValueError(
                f"FLASHMAP cannot verify with --attention-backend {backend} on {device}; choose "
                f"{' or '.join(allowed)}."
            )
