"""Losslessness: what the accept rules commit has the target's distribution, whatever the draft is.

A toy chain of 1 to 3 drafts over 5 tokens runs through the drafter's sampler, the accept rule and
its resampling in one batch of `DRAWS` requests. The committed tokens, continued by the target's own
conditionals, give an unbiased estimate of the distribution of all `γ + 1` tokens, one cell a text.
A lossless rule keeps every cell within 5 standard errors and the total variation within 3 times
what sampling noise makes it on average (3 times is 0.033 at most, and 0.012 mostly). The tests
at the end plant biased rules and see them break that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.srt.speculative.flashmap import verify
from sglang.srt.speculative.flashmap.noise import Stream
from sglang.srt.speculative.flashmap.verify import Accepted, accept_greedy, merge_accepted
from toy_chain import VOCAB, ToyChain, keep_tokens, random_draft, random_target

DRAWS = 100_000


def independent_target(draft: torch.Tensor) -> list[torch.Tensor]:
    """A target that samples the draft's own distributions, whatever came before."""
    last = torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    rows = torch.cat([draft, last])
    return [row.expand((VOCAB,) * (i + 1)) for i, row in enumerate(rows)]


def peaked(token: int, rest: float) -> torch.Tensor:
    row = torch.full((VOCAB,), rest, dtype=torch.float64)
    row[token] = 1 - rest * (VOCAB - 1)
    return row


def scenario_equal() -> ToyChain:
    draft = random_draft(2)
    return ToyChain(independent_target(draft), draft)


SCENARIOS: dict[str, Callable[[], ToyChain]] = {
    "random": lambda: ToyChain(random_target(2), random_draft(2)),
    "three-drafts": lambda: ToyChain(random_target(3), random_draft(3)),
    "one-draft": lambda: ToyChain(random_target(1), random_draft(1)),
    "equal": scenario_equal,
    "peaked-draft": lambda: ToyChain(
        random_target(2), torch.stack([peaked(1, 0.01), peaked(3, 0.005)])
    ),
    "peaked-target": lambda: ToyChain(random_target(2, spread=8.0), random_draft(2)),
    "filtered-target": lambda: ToyChain(keep_tokens(random_target(2), [0, 2, 3]), random_draft(2)),
    "disjoint": lambda: ToyChain(
        keep_tokens(random_target(2), [0, 1]),
        torch.tensor([[0, 0, 0.2, 0.5, 0.3], [0, 0, 0.6, 0.1, 0.3]], dtype=torch.float64),
    ),
    "restricted": lambda: ToyChain(
        random_target(2), random_draft(2, size=3), ids=torch.tensor([0, 2, 3])
    ),
    "one-token-vocabulary": lambda: ToyChain(
        random_target(2), random_draft(2, size=1), ids=torch.tensor([3])
    ),
    "outside-only": lambda: ToyChain(
        keep_tokens(random_target(2), [1, 4]), random_draft(2, size=3), ids=torch.tensor([0, 2, 3])
    ),
    "temperature": lambda: ToyChain(random_target(2), random_draft(2), temperature=0.4),
}

each_scenario = pytest.mark.parametrize("make", SCENARIOS.values(), ids=SCENARIOS)
each_rule = pytest.mark.parametrize("block", [False, True], ids=["token-wise", "block-wise"])


def is_lossless(chain: ToyChain, accepted: Accepted) -> bool:
    estimate = chain.completed(accepted)
    return (
        estimate.worst_cell < 5
        and estimate.total_variation < 3 * estimate.expected_total_variation
        # What the target never says is never committed.
        and bool((estimate.mean[estimate.expected == 0] == 0).all())
    )


@each_rule
@each_scenario
def test_committed_text_has_the_targets_distribution(make: Callable, block: bool) -> None:
    chain = make()
    _, accepted = chain.verify(DRAWS, block_verification=block)
    assert is_lossless(chain, accepted)

    # The number of kept drafts is what the published algorithm gives, enumerated.
    expected = chain.accept_distribution(block_verification=block)
    counts = accepted.num_correct.bincount(minlength=chain.num_drafts + 1)
    deviation = (counts / DRAWS - expected).abs()
    variance = (expected * (1 - expected)).clamp_min(0) / DRAWS
    assert (deviation <= 5 * variance.sqrt() + 1e-6).all()


@each_scenario
def test_block_verification_keeps_no_fewer_drafts(make: Callable) -> None:
    chain = make()
    kept = torch.arange(chain.num_drafts + 1).double()
    token_wise, block_wise = (
        float(chain.accept_distribution(block_verification=block) @ kept) for block in (False, True)
    )
    assert block_wise >= token_wise - 1e-12
    if make is SCENARIOS["random"]:
        assert block_wise > token_wise + 0.01
        mean = [
            chain.verify(DRAWS, block_verification=block)[1].num_correct.double().mean()
            for block in (False, True)
        ]
        assert mean[1] > mean[0]


@each_rule
def test_a_draft_equal_to_the_target_is_kept_whole(block: bool) -> None:
    _, accepted = scenario_equal().verify(20_000, block_verification=block)
    assert (accepted.num_correct == 2).all()


@each_rule
def test_one_request_over_many_positions(block: bool) -> None:
    """One seed at 100 000 anchors: successive steps of a request are as independent as requests."""
    chain = SCENARIOS["random"]()
    _, accepted = chain.verify(
        DRAWS,
        block_verification=block,
        seeds=torch.full((DRAWS,), 2**62 + 1),
        anchors=torch.arange(DRAWS),
    )
    assert is_lossless(chain, accepted)


@each_rule
def test_a_row_does_not_depend_on_its_batch(block: bool) -> None:
    chain = SCENARIOS["random"]()
    seeds, anchors = torch.randint(2**62, (50,)), torch.randint(5000, (50,))
    drafts, together = chain.verify(50, block_verification=block, seeds=seeds, anchors=anchors)
    for row in (0, 17, 49):
        one = slice(row, row + 1)
        draft, alone = chain.verify(
            1, block_verification=block, seeds=seeds[one], anchors=anchors[one]
        )
        assert torch.equal(draft, drafts[one])
        assert torch.equal(alone.num_correct, together.num_correct[one])
        assert torch.equal(alone.bonus, together.bonus[one])


def resample_from_target(p, proposal, slot, scale, taken):
    return p


def residual_without_factor(p, proposal, slot, scale, taken):
    return RESIDUAL(p, proposal, slot, torch.ones_like(scale), taken)


def columns_for_ids(p, proposal, slot, scale, taken):
    columns = torch.arange(proposal.probs.shape[-1])
    misplaced = verify.Proposal(proposal.probs, columns)
    return RESIDUAL(p, misplaced, slot, scale, taken)


def small_coins(seeds, offsets, width, stream):
    return 0.9 * UNIFORM(seeds, offsets, width, stream)


def words_of_the_drafts(seeds, offsets, width, stream):
    """Accept coins out of the very words that the draft tokens were drawn from."""
    return UNIFORM(seeds, offsets, width, Stream.DRAFT_TOKEN.value)


RESIDUAL, UNIFORM = verify._residual, verify.uniform_noise
BIASED_RULES = {
    "resample-from-p": ("_residual", resample_from_target),
    "residual-without-r": ("_residual", residual_without_factor),
    "columns-for-ids": ("_residual", columns_for_ids),
    "small-coins": ("uniform_noise", small_coins),
    "drafts-words-for-coins": ("uniform_noise", words_of_the_drafts),
}


@pytest.mark.parametrize("biased", BIASED_RULES)
def test_a_biased_rule_is_seen(biased: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = SCENARIOS["restricted" if biased == "columns-for-ids" else "three-drafts"]()
    monkeypatch.setattr(verify, *BIASED_RULES[biased])
    _, accepted = chain.verify(DRAWS, block_verification=True)
    estimate = chain.completed(accepted)
    assert estimate.worst_cell > 8
    assert not is_lossless(chain, accepted)


def test_greedy_keeps_the_longest_matching_prefix() -> None:
    target = torch.tensor([[3, 1, 4, 1]] * 5)
    drafts = torch.tensor([[3, 1, 4], [3, 1, 9], [3, 9, 4], [9, 1, 4], [9, 9, 9]])
    block = torch.cat([torch.full((5, 1), 7), drafts], dim=1)
    accepted = accept_greedy(block, target, torch.full((5,), 10))
    assert accepted.num_correct.tolist() == [3, 2, 1, 0, 0]
    end = accepted.end(torch.full((5,), 10))
    assert accepted.bonus.tolist() == end.bonus.tolist() == [1, 4, 1, 3, 3]
    assert end.commit_lens.tolist() == [4, 3, 2, 1, 1]
    assert end.seq_lens.tolist() == [14, 13, 12, 11, 11]


def test_tokens_of_a_chain_are_the_kept_drafts_then_the_bonus() -> None:
    drafts = torch.tensor([[5, 6, 7]] * 4)
    bonus = torch.tensor([10, 11, 12, 13])
    accepted = Accepted.of_chain(drafts, torch.arange(4), bonus)
    kept = [row[: n + 1] for n, row in enumerate(accepted.tokens.tolist())]
    assert kept == [[10], [5, 11], [5, 6, 12], [5, 6, 7, 13]]
    assert torch.equal(accepted.bonus, bonus)
    rows = accepted.with_path().path
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3]]


@pytest.mark.parametrize("paths", [False, True], ids=["chains", "trees"])
def test_merge_takes_each_row_from_its_own_rule(paths: bool) -> None:
    walked = Accepted(torch.tensor([0, 1, 1]), torch.tensor([[7, 0], [8, 3], [9, 2]]))
    if paths:
        path = torch.tensor([[0, -1], [0, 4], [0, 2]], dtype=torch.int32)
        walked = Accepted(walked.num_correct, walked.tokens, path)
    rejected = Accepted(torch.tensor([1, 1, 0]), torch.tensor([[1, 2], [3, 4], [5, 6]]))
    merged = merge_accepted(walked, rejected, torch.tensor([True, False, True]))
    assert merged.num_correct.tolist() == [1, 1, 0]
    assert merged.tokens.tolist() == [[1, 2], [8, 3], [5, 6]]
    assert merged.bonus.tolist() == [2, 3, 5]
    end = merged.end(torch.tensor([10, 20, 30]))
    assert end.commit_lens.tolist() == [2, 2, 1] and end.commit_lens.dtype == torch.int32
    assert end.seq_lens.tolist() == [12, 22, 31]
    if not paths:
        assert merged.path is None
        return
    assert merged.path.tolist() == [[0, 1], [0, 4], [0, -1]]
