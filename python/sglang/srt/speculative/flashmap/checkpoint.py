"""What a FlashMap release folder must contain, checked from file headers alone.

``model.safetensors`` (or shards of it) holds exactly the tensors of ``expected_shapes``;
``draft_vocab.safetensors`` is optional and ranks every token id, most frequent first. A wrong
folder is refused before the target's weights are loaded, in one sentence that names the tensor.
Only safetensors files are read: a draft folder never executes code.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import torch
from sglang.srt.arg_groups.refusal import StartRefused
from sglang.srt.configs.flashmap import FlashMapConfig

DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
# Names under which a loader that reads every file of the folder sees that file's tensors.
DRAFT_VOCAB_TENSORS = ("ids", "counts")
# As torch and as safetensors headers call them, in lower case.
WEIGHT_DTYPES = ("bfloat16", "float16", "float32", "float64", "bf16", "f16", "f32", "f64")
# Characters of a tensor's name that a message shows.
_LONGEST_NAME = 80


class FlashMapCheckpointError(StartRefused):
    """A draft folder whose tensors do not match its config, said in one sentence."""


def expected_shapes(config: FlashMapConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this config."""
    d, h, c = config.hidden_size, config.target_hidden_size, config.cond_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(config.target_layer_ids) * h),
        "hidden_norm.weight": (d,),
        "anchor_proj.weight": (d, h),
        "anchor_proj.bias": (d,),
        "anchor_norm.weight": (d,),
        "state_norm.weight": (h,),
        "noise_norm.weight": (h,),
        "noise_gate": (1,),
        "x_embed.weight": (d, h),
        "x_embed.bias": (d,),
        "head.weight": (h, d),
        "head.bias": (h,),
        "final_adaln.linear.weight": (3 * d, c),
        "final_adaln.linear.bias": (3 * d,),
    }
    for name in ("time_embed", "jump_embed"):
        shapes[f"{name}.linear_1.weight"] = (c, config.time_embed_dim)
        shapes[f"{name}.linear_1.bias"] = (c,)
        shapes[f"{name}.linear_2.weight"] = (c, c)
        shapes[f"{name}.linear_2.bias"] = (c,)
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}"
        for norm in ("self_attn_adaln", "cross_attn_adaln", "mlp_adaln"):
            shapes[f"{layer}.{norm}.linear.weight"] = (3 * d, c)
            shapes[f"{layer}.{norm}.linear.bias"] = (3 * d,)
        for attn in ("self_attn", "cross_attn"):
            shapes[f"{layer}.{attn}.q_proj.weight"] = (d, d)
            shapes[f"{layer}.{attn}.k_proj.weight"] = (kv, d)
            shapes[f"{layer}.{attn}.v_proj.weight"] = (kv, d)
            shapes[f"{layer}.{attn}.o_proj.weight"] = (d, d)
            shapes[f"{layer}.{attn}.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.{attn}.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}.mlp.fc1.weight"] = (config.intermediate_size, d)
        shapes[f"{layer}.mlp.fc1.bias"] = (config.intermediate_size,)
        shapes[f"{layer}.mlp.fc2.weight"] = (d, config.intermediate_size)
        shapes[f"{layer}.mlp.fc2.bias"] = (d,)
    return shapes


def check_names_and_shapes(
    found: dict[str, tuple[int, ...]], config: FlashMapConfig, *, source: str
) -> None:
    """Raise ``FlashMapCheckpointError`` unless ``found`` is exactly the expected tensors."""
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"lacks {_some(missing)}")
        if extra:
            parts.append(f"has the unexpected {_some(extra)}")
        raise FlashMapCheckpointError(
            f"The FlashMap draft {source} {' and '.join(parts)}; use a complete FlashMap release "
            "whose weights match its config.json."
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise FlashMapCheckpointError(
                f"The FlashMap draft {source}: tensor {name} has shape {tuple(found[name])}, its "
                f"config.json asks for {shape}; weights and config are not of one release."
            )


def check_dtype(name: str, dtype: str, *, source: str) -> None:
    """Raise ``FlashMapCheckpointError`` unless ``dtype``, of torch or of a file header, is
    served."""
    if dtype.lower() not in WEIGHT_DTYPES:
        raise FlashMapCheckpointError(
            f"The FlashMap draft {source}: tensor {name} is of dtype {dtype}, not of 16, 32 or 64 "
            "bit floating point; use the unquantized FlashMap release."
        )


def check_finite(name: str, weight: torch.Tensor) -> None:
    """Raise ``FlashMapCheckpointError`` if a loaded ``weight`` holds NaN or infinity.

    One such number makes every draft of the server arbitrary: nothing but the accept length would
    tell.
    """
    if not bool(weight.isfinite().all()):
        raise FlashMapCheckpointError(
            f"The FlashMap draft checkpoint: tensor {name} holds NaN or infinity in "
            f"{weight.dtype}; fetch the draft again, or serve it in the dtype of its release."
        )


def _some(names: list[str]) -> str:
    # A file may call its tensors anything; a message stays one line.
    shown = ", ".join(
        name
        if name.isprintable() and 0 < len(name) <= _LONGEST_NAME
        else ascii(name[:_LONGEST_NAME])
        for name in names[:4]
    )
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more tensors"


@contextmanager
def _headers(path: Path) -> Iterator[Any]:
    """The open safetensors file at ``path``, or ``FlashMapCheckpointError`` if it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise FlashMapCheckpointError(
            f"The FlashMap draft file {path} cannot be read as safetensors ({error}); fetch it "
            "again."
        ) from error


def check_folder(folder: Path, config: FlashMapConfig, *, draft_vocab_size: int) -> None:
    """Check the tensor names and shapes of a local release folder from its file headers."""
    found: dict[str, tuple[int, ...]] = {}
    weights = sorted(p for p in folder.glob("*.safetensors") if p.name != DRAFT_VOCAB_FILE)
    if not weights:
        raise FlashMapCheckpointError(
            f"The FlashMap draft folder {folder} has no model.safetensors; use a complete FlashMap "
            "release (other weight formats are not read)."
        )
    for path in weights:
        with _headers(path) as file:
            for name in file.keys():
                header = file.get_slice(name)
                found[name] = tuple(header.get_shape())
                check_dtype(name, header.get_dtype(), source=str(path))
    check_names_and_shapes(found, config, source=str(folder))
    if draft_vocab_size:
        _check_draft_vocab(folder / DRAFT_VOCAB_FILE, config)


def _check_draft_vocab(path: Path, config: FlashMapConfig) -> None:
    if not path.exists():
        raise FlashMapCheckpointError(
            f"The FlashMap draft has no {DRAFT_VOCAB_FILE}, which ranks the tokens of a restricted "
            "draft vocabulary; pass --speculative-flashmap-draft-vocab-size 0 to draft over the "
            "whole vocabulary."
        )
    with _headers(path) as file:
        if "ids" not in file.keys():
            raise FlashMapCheckpointError(
                f"The FlashMap draft file {path} has no tensor ids; use the file of the release."
            )
        ids = file.get_slice("ids")
        shape, dtype = tuple(ids.get_shape()), ids.get_dtype()
    if shape != (config.vocab_size,):
        raise FlashMapCheckpointError(
            f"The FlashMap draft file {path}: ids has shape {shape}, but it must rank all "
            f"{config.vocab_size} tokens of the vocabulary."
        )
    if not dtype.startswith(("I", "U")):
        raise FlashMapCheckpointError(
            f"The FlashMap draft file {path}: ids has dtype {dtype}, but token ids are integers; "
            "use the file of the release."
        )


def draft_vocabulary(ranking: torch.Tensor, size: int, vocab_size: int) -> torch.Tensor:
    """The ``size`` most frequent token ids of ``ranking (V,)``, ascending, int64.

    Ascending order keeps the gather of LM-head rows local and makes the argmax tie-break (first
    index) the same as over the whole vocabulary.
    """
    ids = ranking.to(torch.int64)
    in_range = bool(((ids >= 0) & (ids < vocab_size)).all())
    if ids.dim() != 1 or not in_range or ids.unique().numel() != ids.numel():
        raise FlashMapCheckpointError(
            f"{DRAFT_VOCAB_FILE}: ids must be distinct token ids below {vocab_size}; use the file "
            "of the release."
        )
    if size > ids.numel():
        raise FlashMapCheckpointError(
            f"--speculative-flashmap-draft-vocab-size {size} is more than the {ids.numel()} tokens "
            f"that {DRAFT_VOCAB_FILE} ranks; choose at most that many."
        )
    return ids[:size].sort().values


__all__ = [
    "DRAFT_VOCAB_FILE",
    "DRAFT_VOCAB_TENSORS",
    "FlashMapCheckpointError",
    "check_dtype",
    "check_finite",
    "check_folder",
    "check_names_and_shapes",
    "draft_vocabulary",
    "expected_shapes",
]
