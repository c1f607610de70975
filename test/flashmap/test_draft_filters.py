"""Drafts of requests with filters: none outside them, accepted more often, output unchanged."""

from __future__ import annotations

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.filter_logits import filter_logits
from sglang.kernels.ops.speculative.flashmap.sampler import sample_draft
from sglang.srt.speculative.flashmap.noise import Stream, row_offsets
from sglang.srt.speculative.flashmap.target_probs import filter_mask
from sglang.srt.speculative.flashmap.verify import Accepted, accept_rejection, propose

VOCAB, DRAFTS, DRAWS, TEMPERATURE = 9, 2, 60_000, 0.8
CASES = {
    "top-k": (3, 1.0, 0.0),
    "top-p": (VOCAB, 0.7, 0.0),
    "min-p": (VOCAB, 1.0, 0.3),
    "joint": (5, 0.8, 0.05),
}


def verify(
    target: torch.Tensor, logits: torch.Tensor, filters: torch.Tensor, block: bool
) -> tuple[torch.Tensor, Accepted]:
    """``DRAWS`` steps: drafts from ``logits (γ, V)``, filtered, checked against ``target``."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (DRAWS,))
    anchors = torch.zeros(DRAWS, dtype=torch.int64)
    rows = logits.repeat(DRAWS, 1)
    temperatures = torch.full((DRAWS,), TEMPERATURE)
    slot_temperatures = temperatures.repeat_interleave(DRAFTS)
    filter_logits(rows, slot_temperatures, filters.expand(len(rows), 3).contiguous())
    drafts = sample_draft(
        rows,
        None,
        slot_temperatures,
        seeds.repeat_interleave(DRAFTS),
        row_offsets(anchors, DRAFTS),
        Stream.DRAFT_TOKEN.value,
    ).view(DRAWS, DRAFTS)
    proposal = propose(
        rows.view(DRAWS, DRAFTS, VOCAB),
        temperatures=temperatures,
        ids=None,
        column_of=None,
    )
    accepted = accept_rejection(
        drafts,
        target.expand(DRAWS, DRAFTS + 1, VOCAB),
        proposal,
        seeds=seeds,
        anchors=anchors,
        block_verification=block,
    )
    return drafts, accepted


@pytest.mark.parametrize("block", [False, True], ids=["token-wise", "block-wise"])
@pytest.mark.parametrize("top_k, top_p, min_p", CASES.values(), ids=CASES)
def test_filtered_drafts(top_k: int, top_p: float, min_p: float, block: bool) -> None:
    torch.manual_seed(1)
    target = torch.softmax(2 * torch.randn(DRAFTS + 1, VOCAB), dim=-1)
    keep = filter_mask(
        target,
        top_ks=torch.full((DRAFTS + 1,), top_k),
        top_ps=torch.full((DRAFTS + 1,), top_p),
        min_ps=torch.full((DRAFTS + 1,), min_p),
    )
    target = target * keep / (target * keep).sum(-1, keepdim=True)
    # A draft near the target, whose own filters do not keep quite the same tokens.
    logits = TEMPERATURE * (target[:DRAFTS] + 0.02).log() + 0.1 * torch.randn(DRAFTS, VOCAB)
    filters = torch.tensor([[top_k, 0.0 if top_p == 1 else top_p, min_p]])
    unfiltered_drafts, unfiltered = verify(target, logits, torch.zeros(1, 3), block)
    drafts, accepted = verify(target, logits, filters, block)

    assert all(
        len(drafts[:, i].unique()) < len(unfiltered_drafts[:, i].unique()) for i in range(DRAFTS)
    )
    assert accepted.num_correct.float().mean() > unfiltered.num_correct.float().mean()
    # The first two tokens of the text: committed ones, then draws of the target.
    tokens = accepted.tokens[:, :2]
    second = torch.multinomial(target[1], DRAWS, replacement=True)
    tokens[:, 1] = torch.where(accepted.num_correct >= 1, tokens[:, 1], second)
    cells = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2) / DRAWS
    expected = (target[0][:, None] * target[1]).flatten()
    noise = (expected * (1 - expected) / DRAWS).sqrt()
    assert (cells - expected).abs().sum() / 2 < noise.sum()
    assert not cells[expected == 0].any()
