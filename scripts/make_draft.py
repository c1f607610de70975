"""Makes an untrained FlashMap draft for a target model: `make_draft.py --target DIR --output DIR`.

With it everything runs before a trained draft exists: the server accepts almost none of its
proposals, so answers are the target's own and the speed is that of wasted drafts.

The folder has a release's files: config.json, model.safetensors, draft_vocab.safetensors. Sizes
come from the target's config.json. Weights are random, scaled so that the context, the anchor and
the noise move the logits. Each tensor has a random stream of its own, keyed by the seed and its
name, so a seed gives the same bytes everywhere and an option changes only the tensors it concerns.
Tokens are ranked as BPE learnt them (ids ascending), end-of-text tokens first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fork.errors import ForkError
from safetensors.torch import save_file

try:
    from sglang.srt.configs.flashmap import FlashMapConfig, FlashMapConfigError
    from sglang.srt.speculative.flashmap.checkpoint import DRAFT_VOCAB_FILE, expected_shapes
except ModuleNotFoundError as error:
    sys.exit(f"error: no module {error.name}: run `make venv` and use .venv/bin/python.")

DTYPES = ("float32", "bfloat16", "float16")
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")
_LAYERS_READ = 5


@dataclass(frozen=True)
class Target:
    """What a draft has to know of its target."""

    name: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> Target:
        """Reads the Hugging Face folder `folder`; a nested text model is the target.

        Raises ForkError when it is not one or does not tell a size.
        """
        if not folder.is_dir():
            raise ForkError(f"--target {folder} is not a folder: give a Hugging Face model's.")
        config = _read_json(folder / "config.json")
        if config is None:
            raise ForkError(
                f"--target {folder} has no readable config.json: give a Hugging Face model's."
            )
        text = config.get("text_config") or config
        sizes = {key: text.get(key) for key in _SIZES}
        if None in sizes.values():
            # The file may leave out what is the default of the model's own config class.
            sizes = _sizes_by_transformers(folder)
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
        generation = _read_json(folder / "generation_config.json") or {}
        eos = [source.get("eos_token_id") for source in (generation, text, config)]
        eos = next((ids for ids in eos if ids is not None), [])
        return cls(
            name=folder.resolve().name,
            dtype=dtype if dtype in DTYPES else "bfloat16",
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
            **sizes,
        )

    def layer_ids(self) -> list[int]:
        """Decoder layers whose outputs the draft reads, spread from the second to the third last.

        Of 36 layers: 1, 9, 17, 25, 33, as the Qwen3-8B release has them.
        Raises ForkError for a target of one layer.
        """
        if self.num_hidden_layers < 2:
            raise ForkError(
                f"the target {self.name} has {self.num_hidden_layers} layer: "
                "a draft reads a layer before the last, so choose a target with at least 2."
            )
        first = min(1, self.num_hidden_layers - 2)
        last = max(first, self.num_hidden_layers - 3)
        count = min(_LAYERS_READ, last - first + 1)
        return [round(first + i * (last - first) / max(1, count - 1)) for i in range(count)]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _sizes_by_transformers(folder: Path) -> dict[str, int]:
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(folder).get_text_config()
        return {key: getattr(text, key) for key in _SIZES}
    except (AttributeError, OSError, ValueError) as error:
        raise ForkError(
            f"{folder / 'config.json'} does not tell all of {', '.join(_SIZES)}: "
            f"add them to it ({str(error).splitlines()[0]})."
        ) from None


def draft_config(target: Target, options: argparse.Namespace) -> FlashMapConfig:
    """The draft's config; sizes not asked for follow the target's, as the releases' do.

    Raises ForkError or FlashMapConfigError for sizes that cannot be.
    """
    if not 0 <= options.draft_vocab_size <= target.vocab_size:
        raise ForkError(
            f"--draft-vocab-size {options.draft_vocab_size} is outside the target's vocabulary: "
            f"choose 0 (all tokens) to {target.vocab_size}."
        )

    def asked(size: int | None, default: int) -> int:
        return default if size is None else size

    width = asked(options.hidden_size, min(2048, max(128, target.hidden_size // 128 * 64)))
    return FlashMapConfig(
        target_model=target.name,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target_layer_ids=target.layer_ids(),
        block_size=options.block_size,
        hidden_size=width,
        num_hidden_layers=asked(options.layers, min(6, max(2, width // 256))),
        num_attention_heads=asked(options.heads, max(1, width // (64 if width < 1024 else 128))),
        intermediate_size=asked(options.intermediate_size, 4 * width),
        noise_gate=options.noise_gate,
        draft_vocab_size=options.draft_vocab_size,
    )


def config_json(config: FlashMapConfig, dtype: str) -> dict[str, Any]:
    """`config.json` with the keys of a release."""
    keys = (
        *("target_model", "target_hidden_size", "vocab_size", "target_layer_ids", "block_size"),
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("cond_dim", "time_embed_dim", "time_scale", "rope_theta", "rms_norm_eps"),
        *("qk_norm_eps", "layer_norm_eps", "noise_gate", "time_schedule", "num_steps"),
        *("jump_grids", "draft_vocab_size", "flow_map", "tie_word_embeddings"),
    )
    return {
        "architectures": ["FlashMapDraftModel"],
        "model_type": config.model_type,
        "torch_dtype": dtype,
        **{key: getattr(config, key) for key in keys},
    }


def draft_weights(config: FlashMapConfig, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, by name."""
    return {
        name: torch.from_numpy(_values(name, shape, seed)).to(dtype)
        for name, shape in expected_shapes(config).items()
    }


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name == "noise_gate":
        return np.ones(shape, np.float32)
    normal = np.random.default_rng([seed, *name.encode()]).standard_normal(shape, np.float32)
    if len(shape) == 2:
        return normal / np.sqrt(np.float32(shape[1]))
    if name.endswith("adaln.linear.bias"):
        # (scale, shift, gate): open gates, or no branch would reach the output.
        normal *= np.float32(0.1)
        normal[2 * shape[0] // 3 :] += 1
        return normal
    return normal * np.float32(0.1) + (0 if name.endswith(".bias") else 1)


def draft_vocabulary(target: Target) -> dict[str, torch.Tensor]:
    """`ids`, every token most frequent first, and `counts`, which fall as 1 / rank."""
    first = sorted(token for token in set(target.eos_token_ids) if 0 <= token < target.vocab_size)
    ids = np.concatenate([first, np.setdiff1d(np.arange(target.vocab_size), first)])
    counts = target.vocab_size // np.arange(1, target.vocab_size + 1)
    return {"ids": torch.from_numpy(ids.astype(np.int64)), "counts": torch.from_numpy(counts)}


def check_output(folder: Path, force: bool) -> None:
    """Raises ForkError unless a draft may be written to `folder`."""
    if folder.is_file():
        raise ForkError(f"--output {folder} is a file: choose another.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise ForkError(f"--output {folder} is not empty: choose another or pass --force.")
    if (_read_json(folder / "config.json") or {}).get("model_type") != FlashMapConfig.model_type:
        raise ForkError(
            f"--output {folder} is not a FlashMap draft, and --force replaces only one: "
            "choose another --output."
        )


def make_draft(options: argparse.Namespace) -> str:
    """Writes the draft that `options` asks for; returns what to tell the user.

    Raises ForkError or FlashMapConfigError when it cannot be made.
    """
    output: Path = options.output
    check_output(output, options.force)
    if options.seed < 0:
        raise ForkError(f"--seed {options.seed} is negative: choose 0 or more.")
    target = Target.read(options.target)
    config = draft_config(target, options)
    dtype = options.dtype or target.dtype
    weights = draft_weights(config, options.seed, getattr(torch, dtype))

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f"{output.name}.") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        text = json.dumps(config_json(config, dtype), indent=2)
        (made / "config.json").write_text(text + "\n")
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        save_file(draft_vocabulary(target), made / DRAFT_VOCAB_FILE)
        for path in made.iterdir():
            path.chmod(0o644)
        if output.exists():
            output.replace(Path(scratch) / "old")
        made.replace(output)

    parameters = sum(weight.numel() for weight in weights.values())
    megabytes = sum(path.stat().st_size for path in output.iterdir()) / 1e6
    return (
        f"{output}: an untrained draft for {target.name}, {parameters / 1e6:.1f}M parameters in "
        f"{dtype}, {megabytes:.1f} MB; {config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, blocks of {config.block_size}, reading target layers "
        f"{config.target_layer_ids} of {target.num_hidden_layers}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    words = "the draft's folder, to be made"
    parser.add_argument("--output", type=Path, required=True, help=words)
    parser.add_argument("--force", action="store_true", help="replace the draft that is there")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a draft proposes (16)")
    follow = "(follows the target's)"
    parser.add_argument("--layers", type=int, help=f"DiT layers {follow}")
    parser.add_argument("--hidden-size", type=int, help=f"DiT width {follow}")
    parser.add_argument(
        "--heads", type=int, help="attention heads (width / 64, or / 128 from 1024)"
    )
    parser.add_argument("--intermediate-size", type=int, help="MLP width (4 * width)")
    parser.add_argument("--noise-gate", choices=("jump", "constant"), default="jump")
    words = "draft only this many most frequent tokens (0: all)"
    parser.add_argument("--draft-vocab-size", type=int, default=0, help=words)
    parser.add_argument("--dtype", choices=DTYPES, help=f"of the weights {follow}")
    options = parser.parse_args(arguments)
    options.output = options.output.absolute()
    try:
        print(make_draft(options))
    except OSError as error:
        words = f"--output {options.output} cannot be written ({error.strerror})"
        print(f"error: {words}: choose another.", file=sys.stderr)
        return 1
    except (ForkError, FlashMapConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
