"""Draft folders that are broken or hostile, and what becomes of them before a server would start.

Every folder goes through the real argument resolution and, if that lets it pass, the real loader.
It must end in a draft that is ready or in one error that says what is wrong; no file of a draft
folder may ever be executed.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path
from typing import Any, Callable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models.flashmap import FlashMapDraftModel
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.flashmap.checkpoint import draft_vocabulary
from sglang.srt.speculative.flashmap.config import resolve_draft_vocab_size

WEIGHTS, RANKING = "model.safetensors", "draft_vocab.safetensors"
PLANTED = "executed"
HOSTILE_NAMES = (
    "",
    "__class__",
    "../../escape",
    "layers.0.\0",
    "a" * 5000,
    "fc.weight\n",
    "🐱",
    "ids",
)
HOSTILE_VALUES = (None, True, -1, 0, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), "",
                  "16", "é" * 3000, [], [0], [[1]], [10**20], {}, {"1": []})  # fmt: skip


class Payload:
    """Unpickling it leaves a file behind."""

    def __init__(self, planted: Path) -> None:
        self.planted = planted

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.planted),)


def _tensors(folder: Path, rng: random.Random) -> None:
    """Weights that are not numbers, of another dtype or shape, missing, renamed or superfluous."""
    name = rng.choice((WEIGHTS, WEIGHTS, RANKING))
    tensors = load_file(folder / name)
    key = rng.choice(list(tensors))
    old = tensors[key]
    change = rng.randrange(8)
    if change == 0 and old.is_floating_point():
        flat = old.view(-1)
        flat[rng.randrange(len(flat))] = rng.choice((float("nan"), float("inf"), float("-inf")))
    elif change == 1:
        dtypes = (torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float64,
                  torch.float16, torch.bfloat16, torch.complex64)  # fmt: skip
        tensors[key] = old.to(rng.choice(dtypes))
    elif change == 2:
        tensors[key] = torch.cat([old, old])
    elif change == 3:
        del tensors[key]
    elif change == 4:
        tensors[rng.choice(HOSTILE_NAMES)] = tensors.pop(key)
    elif change == 5:
        tensors[rng.choice(HOSTILE_NAMES)] = torch.ones(rng.choice((0, 1, 7)))
    elif change == 6:
        tensors[key] = old[:0].clone()
    else:
        tensors[key] = old.flatten().flip(0).view(old.shape).contiguous()
    save_file(tensors, folder / name)


def _bytes(folder: Path, rng: random.Random) -> None:
    """Files that end early or late, with bytes changed."""
    path = folder / rng.choice((WEIGHTS, RANKING, "config.json"))
    content = bytearray(path.read_bytes())
    change = rng.randrange(4)
    if change == 0:
        content = content[: rng.choice((0, 1, 7, 8, 9, rng.randrange(len(content))))]
    elif change == 1:
        content += bytes(rng.randrange(256) for _ in range(rng.randint(1, 40)))
    elif change == 2:
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(min(len(content), 4000))] = rng.randrange(256)
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _header(folder: Path, rng: random.Random) -> None:
    """A header of an absurd length, or one that lies about what follows."""
    path = folder / rng.choice((WEIGHTS, RANKING))
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    key = rng.choice([k for k in header if k != "__metadata__"])
    change = rng.randrange(5)
    if change == 0:
        absurd = rng.choice((0, 2**16, 2**32, 2**62, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", absurd) + content[8:])
        return
    if change == 1:
        header[key]["shape"] = rng.choice(([], [2**40, 2**40], [-1], [0], [10**30], "x"))
    elif change == 2:
        header[key]["data_offsets"] = rng.choice(([0, 2**50], [9, 1], [-8, 0], [0], None))
    elif change == 3:
        header[key]["dtype"] = rng.choice(("F64", "I8", "F128", "", None, "__import__"))
    else:
        header[rng.choice(HOSTILE_NAMES)] = header[key]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _config(folder: Path, rng: random.Random) -> None:
    """Keys dropped, or set to what they cannot be."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    keys = (*config, "head_dim", "num_key_value_heads", "dtype", "rope_scaling",
            "quantization_config", "architectures", "id2label", "text_config")  # fmt: skip
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(keys)
        if rng.random() < 0.2:
            config.pop(key, None)
        else:
            config[key] = rng.choice(HOSTILE_VALUES)
    path.write_text(json.dumps(config))


def _code(folder: Path, rng: random.Random) -> None:
    """Code and pickles that wait to be run."""
    planted = folder.with_name(PLANTED)
    source = f"import os\nos.mkdir({str(planted)!r})\n"
    config = json.loads((folder / "config.json").read_text())
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    config["auto_map"] = {name: "custom.Custom" for name in names}
    if rng.random() < 0.3:
        config["model_type"] = rng.choice(("custom", "llama", ""))
    if rng.random() < 0.3:
        config["architectures"] = ["custom.Custom"]
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("custom.py", "__init__.py", "configuration_flashmap.py", "setup.py"):
        (folder / name).write_text(source)
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "model.pkl"):
        (folder / name).write_bytes(pickle.dumps(Payload(planted)))
    if rng.random() < 0.5:
        (folder / WEIGHTS).unlink()


def _links(folder: Path, rng: random.Random) -> None:
    """Links to nowhere, to themselves, to devices, folders and other files instead of files."""
    path = folder / rng.choice((WEIGHTS, RANKING, "config.json"))
    target = rng.choice(("nowhere", path.name, "/dev/null", ".", WEIGHTS, RANKING))
    path.unlink()
    if rng.random() < 0.2:
        path.mkdir()
    else:
        path.symlink_to(target)


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "tensors": _tensors,
    "bytes": _bytes,
    "header": _header,
    "config": _config,
    "code": _code,
    "links": _links,
}


def draft_base(draft: Path, folder: Path) -> Path:
    """Copy a draft to `folder`, with a restricted vocabulary, so that its ranking is read too."""
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 200}))
    return folder


def write_fuzzed(folder: Path, base: Path, seed: int) -> str:
    """Copy the draft `base` to `folder` and damage it once or twice; what was done."""
    rng = random.Random(seed)
    shutil.copytree(base, folder)
    kinds = [rng.choice(list(DAMAGE))]
    if rng.random() < 0.2:
        kinds.append(rng.choice(list(DAMAGE)))
    for kind in kinds:
        try:
            DAMAGE[kind](folder, rng)
        except (OSError, ValueError, RuntimeError, LookupError, struct.error, SafetensorError):
            pass  # the first damage left nothing for the second
    return "+".join(kinds)


def serve_until_loaded(target: Path, draft: Path, *flags: str) -> Any:
    """What a server does with a draft folder: resolve the arguments, load the weights."""
    command = ["--model-path", str(target), "--device", "cpu", "--mem-fraction-static", "0.1"]
    command += ["--speculative-algorithm", "FLASHMAP", "--dtype", "float32"]
    command += ["--speculative-draft-model-path", str(draft), *flags]
    server_args = prepare_server_args(command)
    server_args.resolve_once()
    server_args.check_server_args()
    read = ModelConfig.from_server_args(server_args, model_path=str(draft), is_draft_model=True)
    config = read.hf_config
    model = FlashMapDraftModel(config)
    loader = DefaultModelLoader(LoadConfig())
    source = DefaultModelLoader.Source(str(draft), revision=None)
    with get_context().override_server_args():
        model.load_weights(loader._get_weights_iterator(source))
    size = resolve_draft_vocab_size(None, config)
    if size:
        draft_vocabulary(model._vocab_ranking, size, config.vocab_size)
    return model


def verdict(target: Path, draft: Path, *flags: str) -> str:
    """Empty if the folder loads; else the message of the `ValueError` that refuses it."""
    try:
        serve_until_loaded(target, draft, *flags)
    except ValueError as error:
        return str(error)
    return ""
