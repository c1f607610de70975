"""Which rows of the draft's KV pool a commit writes, and that chunks write what one pass writes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from draft_pair import LAYER_IDS, TARGET_HIDDEN, DraftPair, Pool, Requests
from sglang.srt.models import flashmap

WIDTH, WINDOWS = 5, 4


@pytest.fixture(scope="module")
def pair() -> DraftPair:
    return DraftPair()


def hidden_states(rows: int) -> torch.Tensor:
    return torch.randn(rows, len(LAYER_IDS) * TARGET_HIDDEN)


@pytest.mark.parametrize(
    "commit_lens",
    [(0, 2, 5, 1), (0, 0, 0, 0), (5, 5, 5, 5)],
    ids=["mixed", "nothing", "everything"],
)
def test_a_commit_writes_the_committed_rows_only(pair: DraftPair, commit_lens: tuple) -> None:
    rows = WINDOWS * WIDTH
    hidden, positions = hidden_states(rows), torch.randint(500, (rows,))
    slots = torch.randperm(90)[:rows]
    whole, partial = Pool(pair.config, 90), Pool(pair.config, 90)
    before = partial.snapshot()
    pair.model.write_target_hidden_kv(
        target_hidden=hidden, pool=whole, positions=positions, cache_loc=slots
    )
    pair.model.write_target_hidden_kv(
        target_hidden=hidden,
        pool=partial,
        positions=positions,
        cache_loc=slots,
        cache_loc_2d=slots.view(WINDOWS, WIDTH),
        commit_lens=torch.tensor(commit_lens, dtype=torch.int32),
    )
    committed = (torch.arange(WIDTH) < torch.tensor(commit_lens)[:, None]).flatten()
    expected = before.clone()
    expected[:, :, slots[committed]] = whole.snapshot()[:, :, slots[committed]]
    assert torch.equal(partial.snapshot(), expected)
    assert not (whole.snapshot()[:, :, slots] == before[:, :, slots]).all(dim=-1).any()


@pytest.mark.parametrize("rows", [64, 150, 1], ids=lambda n: f"{n}-rows")
def test_chunks_equal_one_write(
    pair: DraftPair, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, positions = hidden_states(rows), torch.arange(rows)
    slots = 1 + torch.randperm(rows)
    pools = []
    for chunk in (rows, 32):
        monkeypatch.setattr(flashmap, "_CONTEXT_CHUNK", chunk)
        pools.append(Pool(pair.config, rows + 1))
        pair.model.write_target_hidden_kv(
            target_hidden=hidden, pool=pools[-1], positions=positions, cache_loc=slots
        )
    assert torch.equal(pools[0].snapshot(), pools[1].snapshot())


def test_a_verify_window_is_never_chunked(pair: DraftPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commit lengths are one a window, so a chunk would read the wrong ones."""
    rows = WINDOWS * WIDTH
    hidden, positions, slots = hidden_states(rows), torch.arange(rows), torch.randperm(rows)
    lens = torch.tensor([0, 2, 5, 1], dtype=torch.int32)
    pools = []
    for chunk in (rows, 3):
        monkeypatch.setattr(flashmap, "_CONTEXT_CHUNK", chunk)
        pools.append(Pool(pair.config, rows))
        pair.model.write_target_hidden_kv(
            target_hidden=hidden,
            pool=pools[-1],
            positions=positions,
            cache_loc=slots,
            cache_loc_2d=slots.view(WINDOWS, WIDTH),
            commit_lens=lens,
        )
    assert torch.equal(pools[0].snapshot(), pools[1].snapshot())


def test_an_empty_write_does_nothing(pair: DraftPair) -> None:
    pool = Pool(pair.config, 4)
    before = pool.snapshot()
    nothing = torch.zeros(0, dtype=torch.int64)
    pair.model.write_target_hidden_kv(
        target_hidden=hidden_states(0), pool=pool, positions=nothing, cache_loc=nothing
    )
    assert torch.equal(pool.snapshot(), before)


def test_an_entry_depends_on_hidden_state_and_position_alone(pair: DraftPair) -> None:
    hidden = hidden_states(40)

    def entries(rows: slice, first_position: int) -> torch.Tensor:
        pool = Pool(pair.config, 40)
        count = hidden[rows].shape[0]
        pair.model.write_target_hidden_kv(
            target_hidden=hidden[rows],
            pool=pool,
            positions=first_position + torch.arange(count),
            cache_loc=torch.arange(count),
        )
        return pool.snapshot()[:, :, :count]

    together = entries(slice(0, 40), 7)[:, :, 20:]
    alone = entries(slice(20, 40), 27)
    torch.testing.assert_close(alone, together, rtol=1e-6, atol=1e-6)
    moved = entries(slice(20, 40), 28)
    assert (moved[:, 0] - alone[:, 0]).abs().amax() > 0.1  # keys turn with the position
    torch.testing.assert_close(moved[:, 1], alone[:, 1], rtol=1e-6, atol=1e-6)  # values do not


class Side:
    """Stands in for a `SideStream`; says what was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks = 0

    def fork(self) -> contextlib.nullcontext:
        return contextlib.nullcontext()

    def mark(self) -> SimpleNamespace:
        self.marks += 1
        return SimpleNamespace(wait=lambda name=f"wait {self.marks}": self.log.append(name))


@pytest.mark.parametrize("layers", [1, 3], ids=lambda n: f"{n}-layers")
def test_anchors_written_on_a_side_stream(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same entries, and every layer that attends to them waits first."""
    pair, side = DraftPair(num_hidden_layers=layers), Side()
    requests = Requests(pair.config)
    whole, beside = (Pool(pair.config, requests.num_slots) for _ in range(2))
    requests.write_anchors(pair.model, whole)
    context = requests.write_anchors(pair.model, beside, side)
    assert torch.equal(beside.snapshot(), whole.snapshot())
    attend = pair.model.attention

    def noted(*args):
        side.log.append("attend")
        return attend(*args)

    monkeypatch.setattr(pair.model, "attention", noted)
    noise = torch.randn(len(requests.lens) * pair.config.block_size, pair.model.noise_width)
    pair.model.draft_logits(noise, requests.slot_positions(pair.config.block_size), context)
    waited = ["wait 1", "attend", "wait 2", "attend", "attend"]
    assert side.log == (waited if layers == 3 else waited[:2])
