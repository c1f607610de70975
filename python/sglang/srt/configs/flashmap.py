"""Configuration of a FlashMap draft model, validated when it is read.

A FlashMap release folder holds this as ``config.json`` (``model_type: flashmap``). Everything the
server needs to know about the draft before it loads a weight is here: which target it was made
for (vocabulary, hidden size, layers whose outputs it reads), the block size, the DiT's geometry
and the jump grids. ``validate`` refuses a config that no draft could run on; whether it fits the
*served* target is checked by ``validate_for_target``. Both raise ``FlashMapConfigError``, whose
message is one sentence that names the key and the way out.

The attributes ``num_key_value_heads``, ``head_dim`` and ``max_position_embeddings`` exist for
sglang: it sizes the draft's KV pool (the cross-attention context) from them. RoPE angles are
computed on the fly, so a draft has no length limit of its own, whatever its file says.
"""

from __future__ import annotations

import math
import re
from typing import Any, Sequence

from transformers import PretrainedConfig

# Jump times of the "decoding_error" schedule (Flow Map Language Models, arXiv:2602.16813,
# eq. 25) at the Qwen3 vocabulary size; the published checkpoints were trained on them.
DEFAULT_JUMP_GRIDS: dict[str, list[float]] = {
    "1": [0.0, 1.0],
    "2": [0.0, 0.8172569274902344, 1.0],
    "3": [0.0, 0.8010796308517456, 0.8310279846191406, 1.0],
    "4": [0.0, 0.7906050682067871, 0.8172569274902344, 0.8379518389701843, 1.0],
}

MAX_BLOCK_SIZE = 64
_MAX_LAYERS = 1024
# The draft attends at absolute target positions and has no limit of its own.
_UNLIMITED_POSITIONS = 1 << 30
# Where sglang would look for the language model of a model of several parts.
_NESTED_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
# A jump grid's key.
_STEPS = re.compile("[1-9][0-9]{0,3}")
# RMSNorm and attention kernels index head channels in powers of two up to this.
_MAX_HEAD_DIM = 256


class FlashMapConfigError(ValueError):
    """A FlashMap draft config that cannot be served, said in one sentence."""


def _require_int(name: str, value: Any, *, low: int = 1, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise FlashMapConfigError(
            f"FlashMap draft config: {name} must be an integer of at least {low}, got {value!r}; "
            "use a config.json of a FlashMap release."
        )
    if high is not None and value > high:
        raise FlashMapConfigError(
            f"FlashMap draft config: {name} must be at most {high}, got {value!r}."
        )
    return value


def _require_positive(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise FlashMapConfigError(
            f"FlashMap draft config: {name} must be a positive number, got {value!r}."
        )
    return float(value)


def _all_text(values: list) -> bool:
    return all(isinstance(value, str) for value in values)


class FlashMapConfig(PretrainedConfig):
    """A FlashMap drafter (keys and defaults of the Qwen3-8B release).

    Args:
        target_model: Hub id of the target the draft was trained for (informative).
        target_hidden_size: hidden size ``H`` of the target.
        vocab_size: vocabulary ``V`` of the target.
        target_layer_ids: target decoder layers whose outputs are the draft's context
            (``hidden_states[i + 1]`` of a transformers forward), in rising order.
        block_size: tokens ``K`` drafted per block.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: the DiT.
        num_key_value_heads: key/value heads of both attentions; default all heads (MHA).
        cond_dim, time_embed_dim, time_scale: the time conditioning.
        rope_theta, rms_norm_eps, qk_norm_eps, layer_norm_eps: numerics.
        noise_gate: ``"jump"`` weights the noise embedding by ``noise_gate * (t - s)``,
            ``"constant"`` by ``noise_gate``.
        num_steps: jumps per draft; ``jump_grids[str(num_steps)]`` are their times.
        draft_vocab_size: drafts are restricted to this many most frequent tokens of
            ``draft_vocab.safetensors``; 0 drafts over the whole vocabulary.
        flow_map: ``False`` marks a stage-1 flow, which cannot draft in a few jumps.
        head_dim: ``hidden_size / num_attention_heads``, if it is given at all.
    """

    model_type = "flashmap"

    def __init__(
        self,
        target_model: str = "Qwen/Qwen3-8B",
        target_hidden_size: int = 4096,
        vocab_size: int = 151936,
        target_layer_ids: Sequence[int] = (1, 9, 17, 25, 33),
        block_size: int = 16,
        hidden_size: int = 2048,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        intermediate_size: int = 8192,
        cond_dim: int = 256,
        time_embed_dim: int = 256,
        time_scale: float = 1000.0,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        qk_norm_eps: float = 1e-5,
        layer_norm_eps: float = 1e-6,
        noise_gate: str = "jump",
        time_schedule: str = "decoding_error",
        num_steps: int = 1,
        jump_grids: dict[str, list[float]] | None = None,
        draft_vocab_size: int | None = 0,
        flow_map: bool = True,
        head_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.target_model = target_model
        self.target_hidden_size = target_hidden_size
        self.vocab_size = vocab_size
        self.target_layer_ids = target_layer_ids
        if isinstance(target_layer_ids, tuple):
            self.target_layer_ids = list(target_layer_ids)
        self.block_size = block_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = (
            num_attention_heads if num_key_value_heads is None else num_key_value_heads
        )
        self.intermediate_size = intermediate_size
        self.cond_dim = cond_dim
        self.time_embed_dim = time_embed_dim
        self.time_scale = time_scale
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.qk_norm_eps = qk_norm_eps
        self.layer_norm_eps = layer_norm_eps
        self.noise_gate = noise_gate
        self.time_schedule = time_schedule
        self.num_steps = num_steps
        self.jump_grids = dict(DEFAULT_JUMP_GRIDS) if jump_grids is None else jump_grids
        self.draft_vocab_size = 0 if draft_vocab_size is None else draft_vocab_size
        self.flow_map = flow_map
        # Before transformers checks the same values with vaguer messages.
        self.validate()
        if head_dim not in (None, self.head_dim):
            raise FlashMapConfigError(
                f"FlashMap draft config: head_dim {head_dim!r} is not hidden_size / "
                f"num_attention_heads = {self.head_dim}; leave it out."
            )
        nested = [name for name in _NESTED_CONFIGS if name in kwargs]
        if nested:
            raise FlashMapConfigError(
                f"FlashMap draft config: {nested[0]} belongs to models of several parts, which a "
                "draft is not; leave it out."
            )
        methods = sorted(name for name in kwargs if callable(getattr(type(self), name, None)))
        if methods:
            raise FlashMapConfigError(
                f"FlashMap draft config: {methods[0]} is no key of a draft but a function of its "
                "config class; leave it out."
            )
        names = kwargs.get("architectures", ["FlashMapDraftModel"])
        if names is not None and not (isinstance(names, list) and names and _all_text(names)):
            raise FlashMapConfigError(
                "FlashMap draft config: architectures must be a list that names the model class, "
                f"got {names!r}; leave it out."
            )
        kwargs.setdefault("tie_word_embeddings", False)
        kwargs["max_position_embeddings"] = _UNLIMITED_POSITIONS
        super().__init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Channels per attention head ``D``."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As a file is read; it may leave out ``architectures``, the class that sglang looks up.

        ``auto_map`` is dropped: sglang imports what it names, whatever the user trusts, when it
        knows no model class for ``architectures``.
        """
        config_dict = {key: value for key, value in config_dict.items() if key != "auto_map"}
        if config_dict.get("architectures") is None:
            config_dict["architectures"] = ["FlashMapDraftModel"]
        return super().from_dict(config_dict, **kwargs)

    def grid(self, num_steps: int | None = None) -> list[float]:
        """Jump times ``[0, t_1, …, 1]`` of a draft with ``num_steps`` jumps (default: the
        config's)."""
        steps = self.num_steps if num_steps is None else num_steps
        times = self.jump_grids.get(str(steps))
        if times is None:
            known = ", ".join(sorted(self.jump_grids, key=int))
            raise FlashMapConfigError(
                f"--speculative-flashmap-num-steps {steps}: the draft has no jump grid for {steps} "
                f"steps; choose one of {known}."
            )
        return [float(t) for t in times]

    def validate(self) -> None:
        """Raise ``FlashMapConfigError`` unless some target could be served with this config."""
        if not isinstance(self.flow_map, bool):
            raise FlashMapConfigError(
                f"FlashMap draft config: flow_map must be true or false, got {self.flow_map!r}."
            )
        if not self.flow_map:
            raise FlashMapConfigError(
                "FlashMap draft config: flow_map is false, a stage-1 flow that drafts only by "
                "integrating over many steps; serve the flow map distilled from it."
            )
        for name in (
            "target_hidden_size",
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "cond_dim",
        ):
            _require_int(name, getattr(self, name))
        _require_int("block_size", self.block_size, high=MAX_BLOCK_SIZE)
        _require_int("num_hidden_layers", self.num_hidden_layers, high=_MAX_LAYERS)
        if _require_int("time_embed_dim", self.time_embed_dim, low=2) % 2:
            raise FlashMapConfigError(
                f"FlashMap draft config: time_embed_dim must be even, got {self.time_embed_dim}."
            )
        for name in ("time_scale", "rope_theta", "rms_norm_eps", "qk_norm_eps", "layer_norm_eps"):
            _require_positive(name, getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            raise FlashMapConfigError(
                f"FlashMap draft config: hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise FlashMapConfigError(
                f"FlashMap draft config: num_attention_heads {self.num_attention_heads} is not a "
                f"multiple of num_key_value_heads {self.num_key_value_heads}."
            )
        if self.head_dim % 2 or self.head_dim > _MAX_HEAD_DIM:
            raise FlashMapConfigError(
                f"FlashMap draft config: head_dim {self.head_dim} (hidden_size / "
                f"num_attention_heads) must be even and at most {_MAX_HEAD_DIM}."
            )
        self._validate_layer_ids()
        if self.noise_gate not in ("jump", "constant"):
            raise FlashMapConfigError(
                f'FlashMap draft config: noise_gate must be "jump" or "constant", '
                f"got {self.noise_gate!r}."
            )
        _require_int("draft_vocab_size", self.draft_vocab_size, low=0)
        self._validate_grids()

    def _validate_layer_ids(self) -> None:
        ids = self.target_layer_ids
        if not isinstance(ids, list) or not ids:
            raise FlashMapConfigError(
                f"FlashMap draft config: target_layer_ids must be a non-empty list, got {ids!r}; "
                "it names the target layers the draft reads and cannot be guessed."
            )
        for layer in ids:
            _require_int("every entry of target_layer_ids", layer, low=0)
        # The target's forward captures each layer once, in the order it runs them.
        if any(a >= b for a, b in zip(ids, ids[1:])):
            raise FlashMapConfigError(
                f"FlashMap draft config: target_layer_ids must rise, got {ids!r}."
            )

    def _validate_grids(self) -> None:
        if not isinstance(self.jump_grids, dict) or not self.jump_grids:
            raise FlashMapConfigError(
                "FlashMap draft config: jump_grids must be a non-empty object, got "
                f"{self.jump_grids!r}."
            )
        for steps, times in self.jump_grids.items():
            valid = (
                _STEPS.fullmatch(str(steps)) is not None
                and isinstance(times, (list, tuple))
                and len(times) == int(steps) + 1
                and all(
                    isinstance(t, (int, float)) and not isinstance(t, bool) and math.isfinite(t)
                    for t in times
                )
                and times[0] == 0
                and times[-1] == 1
                and all(a < b for a, b in zip(times, times[1:]))
            )
            if not valid:
                raise FlashMapConfigError(
                    f"FlashMap draft config: jump_grids[{steps!r}] must rise from 0 to 1 in "
                    f"{steps} jumps, got {times!r}."
                )
        _require_int("num_steps", self.num_steps)
        self.grid()

    def validate_for_target(
        self, *, hidden_size: int, vocab_size: int, num_hidden_layers: int
    ) -> None:
        """Raise ``FlashMapConfigError`` unless the draft fits a target of these sizes."""
        for name, mine, theirs in (
            ("target_hidden_size", self.target_hidden_size, hidden_size),
            ("vocab_size", self.vocab_size, vocab_size),
        ):
            if mine != theirs:
                raise FlashMapConfigError(
                    f"The FlashMap draft was made for a target with {name} {mine} "
                    f"({self.target_model}), but the served target has {theirs}; serve a draft "
                    "trained for this target."
                )
        # What follows the last layer is normed before it can be read.
        outside = [i for i in self.target_layer_ids if i >= num_hidden_layers - 1]
        if outside:
            raise FlashMapConfigError(
                f"The FlashMap draft reads the outputs of target layers {outside} "
                f"(target_layer_ids), but only those of layers 0 to {num_hidden_layers - 2} can be "
                f"read of the served target's {num_hidden_layers} layers; serve a draft trained "
                "for this target."
            )


__all__ = ["DEFAULT_JUMP_GRIDS", "FlashMapConfig", "FlashMapConfigError", "MAX_BLOCK_SIZE"]
