"""``FirstTokenSampler``: a request's first token follows its seed, as all later ones do.

The first token comes from the prefill, whose sampler belongs to the target. Upstream's follows a
``sampling_seed`` only under ``--enable-deterministic-inference`` and with min-p not at all, and its
filters are those of the sampling backend. This one draws from the distribution, and with the
counter-based numbers, of the tokens that a verify step adds. Greedy batches, log-probabilities and
all else are upstream's.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.flashmap.target_probs import filter_probs, greedy_rows
from sglang.srt.speculative.flashmap.verify import draw_target


class FirstTokenSampler(Sampler):
    """Upstream's sampler with FLASHMAP's draws where ``sampling_info.sampling_seed`` is set."""

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> tuple[torch.Tensor, None]:
        """Tokens ``(B,)`` int32 of ``probs (B, V)``, after the tokens at ``positions (B,)``."""
        tokens = draw_target(
            filter_probs(probs, sampling_info),
            seeds=sampling_info.sampling_seed,
            anchors=positions.to(torch.int64),
        )
        return (
            torch.where(greedy_rows(sampling_info), probs.argmax(dim=-1), tokens).to(torch.int32),
            None,
        )
