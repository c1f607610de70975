"""Accepting, committing and allocating add up for any accept lengths, widths, pages and limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_len_per_decode,
    get_alloc_reserve_per_decode,
    get_req_to_token_extra_context_len,
    page_aligned_decode_alloc_lens,
)
from sglang.srt.mem_cache.longest_request import slots_beyond_a_request
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.flashmap.noise import row_offsets
from sglang.srt.speculative.flashmap.verify import (
    Accepted,
    Proposal,
    accept_greedy,
    accept_rejection,
    merge_accepted,
)

VOCAB = 5  # small, so that drafts are right by chance
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def blocks(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts `(B, γ)` and the target's tokens `(B, γ + 1)`."""
    size, num_drafts = draw(st.integers(0, 5)), draw(st.integers(1, 17))
    count = size * (2 * num_drafts + 1)
    tokens = torch.tensor(
        draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)), dtype=torch.int64
    )
    drafts, target = tokens.split([size * num_drafts, size * (num_drafts + 1)])
    drafts, target = (
        drafts.view(size, -1 if size else num_drafts),
        target.view(size, num_drafts + 1),
    )
    kept = draw(st.lists(st.integers(0, num_drafts), min_size=size, max_size=size))
    for row, length in enumerate(kept):  # long accepts too, up to all
        target[row, :length] = drafts[row, :length]
    return drafts, target


def greedy_outcome(drafts: torch.Tensor, target: torch.Tensor) -> Accepted:
    anchors = torch.zeros_like(target[:, :1])
    return accept_greedy(torch.cat([anchors, drafts], dim=1), target, anchors[:, 0])


@quick
@given(block=blocks())
def test_greedy_commits_what_one_token_at_a_time_would(
    block: tuple[torch.Tensor, torch.Tensor],
) -> None:
    drafts, target = block
    accepted = greedy_outcome(drafts, target)
    committed = accepted.tokens
    assert committed.shape == target.shape
    for row in range(len(drafts)):
        expected = []
        for slot in range(target.shape[1]):
            expected.append(int(target[row, slot]))
            if slot == drafts.shape[1] or drafts[row, slot] != target[row, slot]:
                break
        length = int(accepted.num_correct[row]) + 1
        assert committed[row, :length].tolist() == expected
        assert expected[-1] == accepted.bonus[row]


@quick
@given(block=blocks(), data=st.data())
def test_rows_of_a_mixed_batch_stay_apart(
    block: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    drafts, target = block
    greedy = greedy_outcome(drafts, target)
    other = Accepted(torch.zeros_like(greedy.num_correct), greedy.tokens + VOCAB)
    size = len(drafts)
    rows = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool
    )
    merged = merge_accepted(greedy, other, rows)
    for row in range(size):
        source = other if rows[row] else greedy
        assert merged.num_correct[row] == source.num_correct[row]
        assert merged.bonus[row] == source.bonus[row]


@st.composite
def sampled_blocks(draw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Target `(B, γ + 1, V)` and proposal `(B, γ, V)` with zeros, drafts of the latter, seeds."""
    size, num_drafts = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows = torch.rand(size, 2 * num_drafts + 1, VOCAB, generator=generator)
    zeros = torch.rand(rows.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.7]))
    keep = torch.randint(VOCAB, rows.shape[:-1], generator=generator)
    zeros.scatter_(2, keep[..., None], False)  # a row filters all tokens but one at most
    rows = rows.masked_fill(zeros, 0.0)
    rows /= rows.sum(-1, keepdim=True)
    target, draft = rows.split([num_drafts + 1, num_drafts], dim=1)
    if draw(st.booleans()):
        draft = target[:, :-1].clone()
    drafts = draft.flatten(0, 1).multinomial(1, generator=generator).view(size, num_drafts)
    seeds = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
    return target, draft, drafts, seeds


@quick
@given(block=sampled_blocks(), block_wise=st.booleans())
def test_sampled_steps_commit_only_what_the_target_can_say(
    block: tuple[torch.Tensor, ...], block_wise: bool
) -> None:
    """And the same alone as in a batch."""
    target, draft, drafts, seeds = block
    anchors = torch.arange(len(drafts)) * 1000

    def accept(rows: slice) -> Accepted:
        proposal = Proposal(draft[rows], None)
        return accept_rejection(
            drafts[rows],
            target[rows],
            proposal,
            seeds=seeds[rows],
            anchors=anchors[rows],
            block_verification=block_wise,
        )

    accepted = accept(slice(None))
    committed = accepted.tokens
    for row, kept in enumerate(accepted.num_correct.tolist()):
        for slot in range(kept + 1):
            assert target[row, slot, committed[row, slot]] > 0
        bonus = accepted.bonus[row]
        rejected = kept < drafts.shape[1]
        if rejected and not block_wise and not torch.equal(target[row, kept], draft[row, kept]):
            assert target[row, kept, bonus] > draft[row, kept, bonus], "not of the residual"
        if not block_wise and torch.equal(draft[row], target[row, :-1]):
            assert not rejected, "what the target would say itself was rejected"
        alone = accept(slice(row, row + 1))
        assert (int(alone.num_correct), int(alone.bonus)) == (kept, int(bonus))


@quick
@given(
    anchors=st.lists(st.integers(0, 2**31), min_size=1, max_size=6, unique=True),
    slots=st.integers(1, 64),
    candidates=st.integers(1, 8),
)
def test_no_two_rows_of_noise_share_an_offset(
    anchors: list[int], slots: int, candidates: int
) -> None:
    offsets = row_offsets(torch.tensor(anchors), slots * candidates).flatten()
    assert offsets.unique().numel() == len(anchors) * slots * candidates
    assert offsets.min() >= 0


@quick
@given(
    context=st.integers(1, 70_000),
    width=st.integers(2, 65),
    page=st.sampled_from([1, 2, 16, 64, 128]),
    accepts=st.lists(st.integers(1, 65), max_size=30),
    prompt=st.integers(1, 70_000),
)
def test_a_row_holds_whatever_a_request_reserves(
    context: int, width: int, page: int, accepts: list[int], prompt: int
) -> None:
    """From any prompt, by steps of any length, up to the context limit and a step past it."""
    fields = dict(
        speculative_algorithm="FLASHMAP",
        speculative_num_draft_tokens=width,
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        page_size=page,
    )
    with get_context().override_server_args(**fields):
        reserve = get_alloc_reserve_per_decode()
        row = context + get_req_to_token_extra_context_len()
        assert get_alloc_len_per_decode() >= width
        beyond = slots_beyond_a_request()
    committed = min(prompt, context)
    kv = SimpleNamespace(kv_committed_len=committed, kv_allocated_len=-(-committed // page) * page)
    for accept in (*accepts, width):
        before = kv.kv_allocated_len
        current, allocated, needed = page_aligned_decode_alloc_lens(
            [SimpleNamespace(kv=kv)], reserve=reserve, page_size=page
        )
        assert current == [before] and needed == allocated[0] - before >= 0
        assert allocated[0] % page == 0
        assert kv.kv_committed_len + width <= allocated[0] <= row
        kv.kv_allocated_len = allocated[0]
        kv.kv_committed_len = min(kv.kv_committed_len + min(accept, width), context)
    # The longest request of a pool that it has to itself gets every step it asks for.
    pool = -(-(prompt + beyond) // page) * page
    kv = SimpleNamespace(kv_committed_len=pool - beyond, kv_allocated_len=0)
    _, (allocated,), _ = page_aligned_decode_alloc_lens(
        [SimpleNamespace(kv=kv)], reserve=reserve, page_size=page
    )
    assert allocated <= pool


def test_without_speculation_a_request_leaves_one_slot() -> None:
    with get_context().override_server_args():
        assert slots_beyond_a_request() == 1
