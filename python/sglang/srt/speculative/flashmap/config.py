"""``FlashMapServeConfig``: every setting of a serving process's FLASHMAP, resolved once.

Read from the server arguments by ``FlashMapServeConfig.from_spec`` after ``arg_groups/
flashmap_hook.py`` has validated them; nothing here reads the environment. Symbols: ``K`` block
size, ``W`` verify width (``--speculative-num-draft-tokens``), ``γ`` drafts on the longest path that
is verified (``γ ≤ K``; ``W = γ + 1`` for chains), ``N`` candidate blocks per request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.kernels.ops.speculative.flashmap.tree import MAX_WIDTH
from sglang.srt.configs.flashmap import FlashMapConfig


@dataclass(frozen=True)
class FlashMapServeConfig:
    """Frozen settings of the draft and verify steps."""

    block_size: int
    """Drafts per block, ``K``."""
    verify_width: int
    """Rows per request in a verify forward, ``W``: the anchor and ``W - 1`` drafts."""
    grid: tuple[float, ...]
    """Jump times ``(0, …, 1)``."""
    draft_vocab_size: int
    """Tokens drafts are restricted to; 0: the whole vocabulary."""
    block_verification: bool
    """Block-wise instead of token-wise rejection for sampled requests."""
    noise: str = "auto"
    """How a single jump's noise is embedded: ``auto``, ``cholesky`` or ``folded``."""
    noise_error: float = 0.0
    """Relative error at which the folded form is cut; 0: not at all."""
    noise_temperature: float = 1.0
    """Factor of the draft's starting noise; 0 drafts from one fixed state."""
    draft_temperature: float = 1.0
    """Factor of a sampled request's temperature at which its drafts are drawn."""
    tree_candidates: int = 0
    """Candidate blocks per request, ``N``; 0, and 1 without choices, verifies chains."""
    tree_choices: int = 0
    """Likeliest tokens of a slot and candidate that a tree grows from; 0: votes of candidates."""
    tree_budget: int = 32
    """Candidate blocks per batch."""
    tree_temperature: float = 0.3
    """Sampled requests above it are verified by rejection, on a server of trees too."""
    draft_quantization: str = "none"
    """Weights of the draft: ``none`` as in the checkpoint, ``fp8`` e4m3."""
    jump_bank_size: int = 0
    """Draws of the noise bank for drafts of several jumps; 0: none, the exact state."""
    jump_topk: int = 16
    """Tokens that the bank keeps of a jump's prediction."""

    def __post_init__(self) -> None:
        most = max(self.tree_candidates, 1) * self.block_size + 1
        if self.trees and self.tree_choices:
            most = MAX_WIDTH
        assert 2 <= self.verify_width <= most, self
        assert self.grid[0] == 0.0 and self.grid[-1] == 1.0, self

    @property
    def trees(self) -> bool:
        """Whether the verify forward takes trees; a chain is then a tree without branches."""
        return self.tree_candidates > (0 if self.tree_choices else 1)

    @property
    def num_drafts(self) -> int:
        """Drafts on the longest path verified, ``γ``."""
        return min(self.block_size, self.verify_width - 1)

    def rejects(self, temperature: float) -> bool:
        """Whether a sampled request of this temperature is verified by rejection."""
        return not self.trees or temperature > self.tree_temperature

    @property
    def draws_trees(self) -> bool:
        """Whether rejection goes along trees of draws without replacement, and not chains."""
        return self.trees and self.tree_choices > 0 and not self.block_verification

    def candidates(self, batch_size: int) -> int:
        """Candidate blocks per request of a batch: ``clamp(budget // B, 1, N)``."""
        return max(1, min(self.tree_budget // batch_size, self.tree_candidates))

    @property
    def jumps(self) -> list[tuple[float, float]]:
        """The jumps ``(s, t)`` of a draft, in order."""
        return list(zip(self.grid[:-1], self.grid[1:]))

    def folds_noise(self, device: torch.device) -> bool:
        """Whether a single jump's noise takes the folded form on ``device``."""
        if self.noise != "auto":
            return self.noise == "folded"
        return device.type == "cuda" or self.noise_error > 0

    @classmethod
    def from_spec(cls, spec, config: FlashMapConfig) -> "FlashMapServeConfig":
        """From the resolved ``get_spec()`` leaves and the draft's config."""
        return cls(
            block_size=config.block_size,
            verify_width=int(spec.speculative_num_draft_tokens),
            grid=tuple(config.grid(spec.speculative_flashmap_num_steps)),
            draft_vocab_size=resolve_draft_vocab_size(
                spec.speculative_flashmap_draft_vocab_size, config
            ),
            block_verification=bool(spec.speculative_use_block_verification),
            noise=spec.speculative_flashmap_noise,
            noise_error=spec.speculative_flashmap_noise_error,
            noise_temperature=spec.speculative_flashmap_noise_temperature,
            draft_temperature=spec.speculative_flashmap_draft_temperature,
            tree_candidates=spec.speculative_flashmap_tree_candidates,
            tree_choices=spec.speculative_flashmap_tree_choices,
            tree_budget=spec.speculative_flashmap_tree_budget,
            tree_temperature=spec.speculative_flashmap_tree_temperature,
            draft_quantization=spec.speculative_flashmap_draft_quantization,
            jump_bank_size=spec.speculative_flashmap_jump_bank_size,
            jump_topk=spec.speculative_flashmap_jump_topk,
        )


def resolve_draft_vocab_size(asked: int | None, config: FlashMapConfig) -> int:
    """The draft vocabulary's size, 0 for the whole vocabulary."""
    size = config.draft_vocab_size if asked is None else asked
    return 0 if size >= config.vocab_size else size
