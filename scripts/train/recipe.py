"""A run's settings, fixed from its first step to its last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fork.errors import ForkError

from train.acceptance_loss import LOSSES

STAGES = ("flow", "map", "one-jump")


@dataclass(frozen=True)
class Recipe:
    """All that the weights of a run depend on besides the data, the target and the draft's config.

    `slot_decay` in slots, `warmup` a share of `steps`, `batch_size` conversations a rank.
    """

    stage: str
    steps: int
    batch_size: int = 32
    anchors: int = 32
    max_length: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.03
    clip: float = 1.0
    ema: float = 0.999
    slot_decay: float = 5.0
    labels: str = "tokens"
    one_jump: float = 0.5
    diagonal: float = 0.25
    data_weight: float = 0.0
    acceptance_weight: float = 0.0
    acceptance_loss: str = "length"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ForkError for a setting that cannot be."""
        wrong = {
            "--stage": self.stage not in STAGES,
            "--steps": self.steps < 1,
            "--batch-size": self.batch_size < 1,
            "--anchors": self.anchors < 1,
            "--lr": not 0 < self.learning_rate < 1,
            "--ema": not 0 <= self.ema < 1,
            "--slot-decay": not self.slot_decay > 0,
            "--one-jump-share and --diagonal-share": self.one_jump + self.diagonal > 1
            or min(self.one_jump, self.diagonal) < 0,
            "--acceptance-weight": not 0 <= self.acceptance_weight <= 1,
            "--acceptance-loss": self.acceptance_loss not in LOSSES,
            "--seed": self.seed < 0,
        }
        if any(wrong.values()):
            names = ", ".join(name for name, is_wrong in wrong.items() if is_wrong)
            raise ForkError(f"the value of {names} cannot be: see train_draft.py --help.")
        if self.acceptance_weight and (self.stage, self.labels) != ("one-jump", "target"):
            raise ForkError(
                "--acceptance-weight compares with the target's distributions: "
                "add --stage one-jump --labels target, or leave it out."
            )

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Names of the settings that `other`, a saved recipe, has otherwise."""
        return [key for key, value in self.__dict__.items() if other.get(key) != value]
