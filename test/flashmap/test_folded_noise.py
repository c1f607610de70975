"""FoldedNoise against its definition in float64, its cut, and the noise's temperature."""

from __future__ import annotations

import pytest
import torch
from draft_pair import PREFIX_LENS, TARGET_HIDDEN, DraftPair, Requests, relative_error
from sglang.srt.speculative.flashmap.folded_noise import FoldedNoise
from sglang.srt.speculative.flashmap.noise import embedding_gram

HIDDEN, DIM, EPS = 192, 40, 1e-6


class Definition:
    """`x_embed(u + g noise_norm(y))` of random weights in float64, `y = T (√λ z) Qᵀ`."""

    def __init__(self, temperature: float = 1.0, decay: float = 0.0) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            scales = torch.exp(-decay * torch.arange(HIDDEN))
            self.embedding = torch.randn(500, HIDDEN) @ torch.diag(scales)
            self.uniform, self.norm = torch.randn(1, HIDDEN), torch.rand(HIDDEN) + 0.5
            self.weight, self.bias = torch.randn(DIM, HIDDEN) / HIDDEN**0.5, torch.randn(DIM)
            self.gate = torch.rand(1)
        finally:
            torch.set_default_dtype(torch.float32)
        self.temperature = temperature
        self.values, self.vectors = torch.linalg.eigh(embedding_gram(self.embedding))

    def fold(self, max_error: float = 0.0) -> FoldedNoise:
        return FoldedNoise.fold(
            self.embedding,
            uniform=self.uniform,
            norm_weight=self.norm,
            weight=self.weight,
            bias=self.bias,
            gate=self.gate,
            eps=EPS,
            temperature=self.temperature,
            max_error=max_error,
        )

    def order(self) -> torch.Tensor:
        """Directions in the order in which the folded form takes its draws."""
        rows = (self.vectors * self.values.sqrt()).T * self.norm @ self.weight.T
        return rows.square().sum(1).argsort(descending=True)

    def noise_term(self, z: torch.Tensor) -> torch.Tensor:
        """`g noise_norm(y) Wᵀ` of `z (rows, H)` in that order."""
        order = self.order()
        scaled = self.temperature * z * self.values[order].sqrt()
        y = scaled @ self.vectors[:, order].T
        normed = y * (y.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm
        return self.gate * normed @ self.weight.T

    def base(self) -> torch.Tensor:
        return self.uniform @ self.weight.T + self.bias


@pytest.mark.parametrize("temperature", [1.0, 0.25], ids=lambda t: f"T{t}")
def test_equal_to_the_definition(temperature: float) -> None:
    definition = Definition(temperature)
    folded = definition.fold()
    z = torch.randn(7, HIDDEN, dtype=torch.float64)
    expected = definition.base() + definition.noise_term(z)
    assert folded.width == HIDDEN and folded.error == 0
    # The variances are kept in float32.
    assert relative_error(folded(z), expected) < 1e-6
    # y has the law of T x0 E.
    gram = (definition.vectors * definition.values) @ definition.vectors.T
    assert relative_error(gram, definition.embedding.T @ definition.embedding) < 1e-12


@pytest.mark.parametrize("max_error", [0.3, 0.03, 4e-3])
def test_the_cut_keeps_its_bound(max_error: float) -> None:
    definition = Definition(decay=0.05)
    folded = definition.fold(max_error)
    assert folded.width < HIDDEN and folded.width % 64 == 0
    assert 0 < folded.error <= max_error
    z = torch.randn(4000, HIDDEN, dtype=torch.float64)
    whole = definition.noise_term(z)
    cut = folded(z[:, : folded.width].contiguous()) - definition.base()
    error = float((cut - whole).square().mean().sqrt() / whole.square().mean().sqrt())
    assert 0 < error <= 1.1 * max_error


def test_directions_that_matter_are_not_cut() -> None:
    """A flat spectrum leaves nothing to cut at a small error."""
    assert Definition().fold(0.05).width == HIDDEN


def test_model_drafts_alike_in_both_forms() -> None:
    """Equal points of the noise, each written in its form's own coordinates."""
    pair = DraftPair()
    requests = Requests(pair.config)
    z = pair.seeded_noise(len(PREFIX_LENS))
    y = z.double() @ pair.model._noise_factor.double().T
    logits = {}
    for form in ("cholesky", "folded"):
        pair.attach(noise=form)
        if form == "folded":
            values, vectors = torch.linalg.eigh(embedding_gram(pair.target.embedding))
            weight = pair.weights["x_embed.weight"].double()
            norm = pair.weights["noise_norm.weight"].double()
            rows = (vectors * values.sqrt()).T * norm @ weight.T
            order = rows.square().sum(1).argsort(descending=True)
            z = (y @ vectors[:, order] / values[order].sqrt()).float()
        assert pair.model.noise_width == TARGET_HIDDEN
        pool = pair.prepare(requests)
        positions = requests.slot_positions(pair.config.block_size)
        logits[form] = pair.model.draft_logits(z, positions, requests.context(pool))
    assert logits["folded"].std() > 0.1
    assert relative_error(logits["folded"], logits["cholesky"]) < 1e-4


@pytest.mark.parametrize(
    "settings, num_steps",
    [(dict(noise="cholesky"), 1), (dict(noise="folded"), 1), (dict(), 3)],
    ids=["cholesky", "folded", "3-jumps"],
)
def test_noise_temperature(settings: dict, num_steps: int) -> None:
    """A factor of the noise; at 0 every draw gives the same draft."""
    pair = DraftPair(num_steps=num_steps)
    requests = Requests(pair.config)

    def draft(noise: torch.Tensor, temperature: float) -> torch.Tensor:
        pair.attach(noise_temperature=temperature, **settings)
        pool = pair.prepare(requests)
        positions = requests.slot_positions(pair.config.block_size)
        return pair.model.draft_logits(noise, positions, requests.context(pool))

    z, other = pair.seeded_noise(len(PREFIX_LENS)), pair.seeded_noise(len(PREFIX_LENS)).flip(0)
    assert torch.equal(draft(z, 0.0), draft(other, 0.0))
    assert relative_error(draft(z, 0.01), draft(0.01 * z, 1.0)) < 1e-4
    assert relative_error(draft(z, 1.0), draft(other, 1.0)) > 1e-2
