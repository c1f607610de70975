"""JumpBank: exact where nothing is cut or redrawn, each approximation alone, a request's own."""

from __future__ import annotations

import pytest
import torch
from draft_pair import PREFIX_LENS, VOCAB, DraftPair, Requests, relative_error
from sglang.kernels.ops.speculative.flashmap.noise import gaussian_noise
from sglang.srt.speculative.flashmap.jump_bank import (
    BankNoise,
    JumpBank,
    Prediction,
    jump_coefficients,
)
from sglang.srt.speculative.flashmap.noise import Stream

SIZE = 40
GRID = (0.0, 0.6, 0.75, 1.0)


def exact_state(
    embedding: torch.Tensor, z: torch.Tensor, deltas: list[torch.Tensor], n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(e_n x_n) E` and `x_n E` in float64, jump by jump as defined."""
    state = z.double()
    for s, t, delta in zip(GRID, GRID[1:], deltas[:n]):
        state = ((1 - t) * state + (t - s) * delta.double()) / (1 - s)
    t = GRID[n]
    posterior = (state * t / (1 - t) ** 2).softmax(-1)
    return posterior @ embedding.double(), state @ embedding.double()


def own_noise(rows: torch.Tensor) -> BankNoise:
    """Slots whose own noise is that of the rows they take."""
    return BankNoise(rows, torch.zeros_like(rows), rows)


def sparse(prediction: Prediction) -> torch.Tensor:
    wide = torch.zeros(len(prediction.tokens), VOCAB)
    return wide.scatter_(1, prediction.tokens, prediction.probs)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("n", [1, 2], ids=["jump-2", "jump-3"])
def test_states_are_exact_for_cut_predictions(n: int, temperature: float) -> None:
    """The identity holds for any support, tokens of both predictions included."""
    embedding = torch.randn(VOCAB, 32)
    bank = JumpBank(embedding, GRID, size=SIZE, topk=6, temperature=temperature)
    rows = torch.randint(SIZE, (9,))
    shared = torch.randn(9, VOCAB)
    logits = [4 * shared, 4 * shared + torch.randn(9, VOCAB)][:n]
    predictions = [bank.predict(values, None) for values in logits]
    if n == 2:
        tokens = [p.tokens[:, :, None] for p in predictions]
        assert (tokens[0] == tokens[1].transpose(1, 2)).any()
    z = gaussian_noise(torch.zeros_like(rows), rows, VOCAB, Stream.DRAFT_NOISE.value)
    expected = exact_state(embedding, temperature * z, [sparse(p) for p in predictions], n)
    for got, want in zip(bank.state(own_noise(rows), predictions), expected, strict=True):
        assert relative_error(got, want) < 1e-5


def test_coefficients_follow_the_jumps() -> None:
    z, deltas = torch.randn(7), torch.randn(2, 7)
    state = z
    for n, (alpha, betas) in enumerate(jump_coefficients(GRID)):
        assert len(betas) == n
        combined = alpha * z + sum(b * delta for b, delta in zip(betas, deltas))
        torch.testing.assert_close(combined, state)
        if n < 2:
            s, t = GRID[n], GRID[n + 1]
            state = ((1 - t) * state + (t - s) * deltas[n]) / (1 - s)


@pytest.mark.parametrize("num_steps", [2, 3], ids=lambda n: f"{n}-jumps")
def test_drafts_without_approximations_are_exact(num_steps: int) -> None:
    pair = DraftPair(num_steps=num_steps)
    requests = Requests(pair.config)
    rows = torch.randint(SIZE, (len(PREFIX_LENS) * pair.config.block_size,))
    z = gaussian_noise(torch.zeros_like(rows), rows, VOCAB, Stream.DRAFT_NOISE.value)

    def draft(noise, **settings) -> torch.Tensor:
        pair.attach(**settings)
        pool = pair.prepare(requests)
        positions = requests.slot_positions(pair.config.block_size)
        return pair.model.draft_logits(noise, positions, requests.context(pool))

    exact = draft(z)
    errors = {
        topk: relative_error(draft(own_noise(rows), jump_bank_size=SIZE, jump_topk=topk), exact)
        for topk in (1, 30, VOCAB)
    }
    assert errors[VOCAB] < 1e-4
    assert errors[VOCAB] < errors[30] < errors[1]  # the cut
    other = BankNoise(rows, torch.ones_like(rows), rows)
    drafts = [draft(noise, jump_bank_size=SIZE, jump_topk=4) for noise in (own_noise(rows), other)]
    assert relative_error(*drafts) > 1e-3  # the noise drawn anew
    assert pair.model.derived_bytes() > 4 * SIZE * num_steps * pair.config.target_hidden_size


def test_a_slots_draw_does_not_depend_on_its_batch() -> None:
    bank = JumpBank(torch.randn(VOCAB, 8), GRID, size=SIZE, topk=4, temperature=1.0)
    seeds, offsets = torch.randint(1 << 60, (500,)), torch.arange(500)
    rows = bank.draw(seeds, offsets).rows
    assert rows.min() >= 0 and rows.max() < SIZE and len(rows.unique()) == SIZE
    assert torch.equal(bank.draw(seeds[7:9], offsets[7:9]).rows, rows[7:9])
    again = JumpBank(bank._embedding, GRID, size=SIZE, topk=4, temperature=1.0)
    assert all(torch.equal(a, b) for a, b in zip(bank.tensors(), again.tensors(), strict=True))
