"""The draft model against the flashmap package and against float64 from the definition."""

from __future__ import annotations

import math

import pytest
import torch
from draft_pair import (
    PREFIX_LENS,
    TARGET_HIDDEN,
    VOCAB,
    DraftPair,
    Requests,
    Target,
    draft_sizes,
    relative_error,
)
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.models.flashmap import FlashMapDraftModel
from sglang.srt.speculative.flashmap.attention import ContextAttention

TOLERANCE = 1e-5  # of float32 against float32
FLOAT64_TOLERANCE = 1e-4

GEOMETRIES = {
    "D64-K8-jump-1": dict(head_dim=64),
    "D64-K4-constant-1-tied": dict(head_dim=64, block_size=4, noise_gate="constant", tied=True),
    "D128-K16-constant-1": dict(head_dim=128, block_size=16, noise_gate="constant"),
    "D96-K4-jump-2": dict(head_dim=96, block_size=4, num_steps=2),
    "D128-K8-constant-3-tied": dict(head_dim=128, num_steps=3, noise_gate="constant", tied=True),
    "D64-K16-jump-4": dict(head_dim=64, block_size=16, num_steps=4),
}


def make_pair(tied: bool = False, **sizes) -> DraftPair:
    return DraftPair(target=Target.random(tied=tied), **sizes)


def draft_logits(
    pair: DraftPair, requests: Requests, noise: torch.Tensor, candidates: int = 1
) -> torch.Tensor:
    """Our logits `(B, N · K, Vd)` for noise rows in draft order."""
    pool = pair.prepare(requests)
    positions = requests.slot_positions(pair.config.block_size, candidates)
    logits = pair.model.draft_logits(noise, positions, requests.context(pool), candidates)
    return logits.unflatten(0, (len(PREFIX_LENS), -1))


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_logits_equal_the_package(geometry: dict) -> None:
    pair = make_pair(**geometry)
    requests = Requests(pair.config)
    logits = draft_logits(pair, requests, pair.seeded_noise(len(PREFIX_LENS)))
    expected = torch.stack(
        [pair.reference_logits(requests, b, seed=b) for b in range(len(PREFIX_LENS))]
    )
    # Requests and slots differ by far more than the tolerance, so mixing them up would show.
    assert expected.std(dim=0).mean() > 0.1 and expected.std(dim=1).mean() > 0.1
    assert relative_error(logits, expected) < TOLERANCE


@pytest.mark.parametrize("fused", [False, True], ids=["plain-norms", "fused"])
@pytest.mark.parametrize("noise", ["cholesky", "folded"])
def test_modulations_in_the_weights(
    noise: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU drafts, a block or four at a time (`fused`) and more."""
    pair = make_pair()
    pair.attach(noise=noise)
    requests = Requests(pair.config)
    z = pair.seeded_noise(len(PREFIX_LENS))
    expected = draft_logits(pair, requests, z)
    before = pair.model.derived_bytes()
    monkeypatch.setattr(FlashMapDraftModel, "_can_fold_modulation", lambda self: True)
    monkeypatch.setattr("sglang.srt.models.flashmap.can_fuse", lambda x, dim: fused)
    pair.attach(noise=noise)
    assert pair.model.layers[0].mlp.fc1.weight.numel() == 0
    assert pair.model.derived_bytes() > before
    assert relative_error(draft_logits(pair, requests, z), expected) < TOLERANCE


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_hidden_states_equal_the_package(geometry: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every jump: the DiT's output through the head, which ours folds into the LM head."""
    pair = make_pair(**geometry)
    requests = Requests(pair.config)
    ours, theirs = [], []

    def keep(self, stream, jump, out):
        ours.append(stream.normed(jump.final))
        return self._head(ours[-1], out=out)

    monkeypatch.setattr(FlashMapDraftModel, "_logits", keep)
    pair.reference.register_forward_hook(lambda module, args, output: theirs.append(output[0]))
    draft_logits(pair, requests, pair.seeded_noise(len(PREFIX_LENS)))
    for b in range(len(PREFIX_LENS)):
        pair.reference_logits(requests, b, seed=b)
    jumps = pair.config.num_steps
    assert len(ours) == jumps and len(theirs) == jumps * len(PREFIX_LENS)
    for jump, hidden in enumerate(ours):
        unfolded = torch.nn.functional.linear(
            hidden, pair.weights["head.weight"], pair.weights["head.bias"]
        )
        assert relative_error(unfolded, torch.cat(theirs[jump::jumps])) < TOLERANCE


@pytest.mark.parametrize("head_dim", [64, 96, 128], ids=lambda d: f"D{d}")
def test_context_and_anchor_entries_equal_the_package(head_dim: int) -> None:
    pair = make_pair(head_dim=head_dim)
    requests = Requests(pair.config)
    pool = pair.prepare(requests)
    used = torch.zeros(requests.num_slots, dtype=torch.bool)
    for b, n in enumerate(PREFIX_LENS):
        cache = pair.reference_cache(requests, b)
        embed, head = pair.target.modules()
        pair.reference.draft(requests.anchors[b : b + 1], cache, embed, head)  # writes the anchor
        slots = requests.slots(b, 0, n + 1)
        used[slots] = True
        expected = cache.kv[:, :, 0, :, : n + 1].transpose(2, 3)
        got = pool.snapshot()[:, :, slots]
        assert relative_error(got[..., :n, :, :], expected[..., :n, :, :]) < TOLERANCE
        assert relative_error(got[..., n, :, :], expected[..., n, :, :]) < TOLERANCE
    assert (pool.snapshot()[:, :, ~used] == 1e3).all()


def test_one_jump_from_vocabulary_wide_noise() -> None:
    """The H-wide noise is an exact reduction: the package, given `x0 (K, V)`, drafts what ours
    drafts from the `z` with `z Fᵀ = x0 E`."""
    pair = make_pair()
    requests = Requests(pair.config)
    x0 = torch.randn(len(PREFIX_LENS), pair.config.block_size, VOCAB)
    factor = pair.model._noise_factor.double()
    z = torch.linalg.solve(factor, (x0 @ pair.target.embedding).double().flatten(0, 1).T).T
    logits = draft_logits(pair, requests, z.float())
    expected = torch.stack(
        [pair.reference_logits(requests, b, noise=x0[b]) for b in range(len(PREFIX_LENS))]
    )
    assert relative_error(logits, expected) < TOLERANCE


@pytest.mark.parametrize("num_steps", [1, 3], ids=lambda n: f"{n}-jumps")
@pytest.mark.parametrize("size", [1, 60, VOCAB], ids=lambda n: f"Vd{n}")
def test_restricted_vocabulary(size: int, num_steps: int) -> None:
    """One jump: the package's logits at the draft vocabulary's ids. More: between jumps the state
    moves towards the restricted distribution, which the package's parts give step by step."""
    ranking = torch.randperm(VOCAB)
    pair = DraftPair(num_steps=num_steps, draft_vocab_size=size, ranking=ranking)
    requests = Requests(pair.config)
    noise = pair.seeded_noise(len(PREFIX_LENS))
    ids = ranking[:size].sort().values
    assert torch.equal(pair.model.draft_ids, ids)
    assert torch.equal(pair.model.draft_columns[ids].long(), torch.arange(size))

    logits = draft_logits(pair, requests, noise)
    for b in range(len(PREFIX_LENS)):
        if num_steps == 1 or size == VOCAB:
            expected = pair.reference_logits(requests, b, seed=b)[:, ids]
        else:
            expected = stepwise_logits(
                pair, requests, b, noise.view(len(PREFIX_LENS), -1, VOCAB)[b], ids
            )
        assert relative_error(logits[b], expected) < TOLERANCE


def stepwise_logits(
    pair: DraftPair, requests: Requests, b: int, state: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The package's jumps with the softmax over `ids` alone: `(K, Vd)`."""
    reference, embedding = pair.reference, pair.target.embedding
    embed, head = pair.target.modules()
    cache = pair.reference_cache(requests, b)
    reference.draft(requests.anchors[b : b + 1], cache, embed, head)  # writes the anchor
    positions = requests.slot_positions(pair.config.block_size).view(len(PREFIX_LENS), -1)[
        b : b + 1
    ]
    grid = pair.config.grid()
    for s, t in zip(grid, grid[1:], strict=False):
        inputs = reference.embed_state(state[None], s, t, embedding)
        hidden = reference(inputs, s, t, positions, cache.context(PREFIX_LENS[b] + 1))
        logits = head(hidden)[0][:, ids]
        landed = torch.zeros_like(state)
        landed[:, ids] = logits.softmax(-1)
        state = ((1 - t) * state + (t - s) * landed) / (1 - s)
    return logits


@pytest.mark.parametrize("num_steps", [1, 2], ids=lambda n: f"{n}-jumps")
def test_candidates_equal_separate_drafts(num_steps: int) -> None:
    candidates, pair = 3, make_pair(num_steps=num_steps, block_size=4)
    requests = Requests(pair.config)
    width = pair.model.noise_width
    noise = torch.randn(len(PREFIX_LENS), candidates, pair.config.block_size, width)
    together = draft_logits(pair, requests, noise.view(-1, width), candidates)
    for n in range(candidates):
        alone = draft_logits(pair, requests, noise[:, n].reshape(-1, width))
        block = together[:, n * pair.config.block_size : (n + 1) * pair.config.block_size]
        assert relative_error(block, alone) < TOLERANCE


@pytest.mark.parametrize("draft_vocab_size", [0, 50], ids=["whole", "Vd50"])
def test_bias_scale_and_padding_of_the_lm_head(draft_vocab_size: int) -> None:
    """Rows past the vocabulary (here NaN) are not read; bias and logit scale reach the logits."""
    target = Target.random(bias=True, logit_scale=0.25)
    ranking = torch.randperm(VOCAB)
    pair = DraftPair(target=target, draft_vocab_size=draft_vocab_size, ranking=ranking)
    requests = Requests(pair.config)
    noise = pair.seeded_noise(len(PREFIX_LENS))
    expected = torch.stack(
        [pair.reference_logits(requests, b, seed=b) for b in range(len(PREFIX_LENS))]
    )
    if draft_vocab_size:
        expected = expected[..., ranking[:draft_vocab_size].sort().values]
    assert relative_error(draft_logits(pair, requests, noise), expected) < TOLERANCE

    padding = torch.full((13, TARGET_HIDDEN), math.nan)
    pair.target = Target(
        torch.cat([target.embedding, padding]),
        torch.cat([target.lm_head, padding]),
        torch.cat([target.bias, padding[:, 0]]),
        target.logit_scale,
    )
    pair.attach(draft_vocab_size)
    assert relative_error(draft_logits(pair, requests, noise), expected) < TOLERANCE


def test_bfloat16_rounds_no_worse_than_the_package() -> None:
    exact = DraftPair()
    requests = Requests(exact.config)
    torch.manual_seed(0)
    rounded = DraftPair(dtype=torch.bfloat16)
    torch.testing.assert_close(rounded.weights, exact.weights, rtol=0, atol=0)
    noise = rounded.seeded_noise(len(PREFIX_LENS))
    ours = draft_logits(rounded, requests, noise)
    assert ours.dtype == torch.bfloat16
    theirs = torch.stack(
        [rounded.reference_logits(requests, b, seed=b) for b in range(len(PREFIX_LENS))]
    )
    expected = draft_logits(exact, requests, noise.float())
    error, reference_error = (
        float((x - expected).norm() / expected.norm()) for x in (ours, theirs)
    )
    assert error < 1.25 * reference_error < 0.1


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=lambda n: f"kv{n}")
@pytest.mark.parametrize("num_steps", [1, 2], ids=lambda n: f"{n}-jumps")
def test_grouped_heads_equal_float64(num_steps: int, kv_heads: int) -> None:
    """The package has no grouped heads; with all of them (kv4) it vouches for the definition."""
    sizes = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=kv_heads)
    pair = DraftPair(num_steps=num_steps, block_size=4, **sizes)
    requests = Requests(pair.config)
    noise = pair.seeded_noise(len(PREFIX_LENS)).view(len(PREFIX_LENS), pair.config.block_size, -1)
    logits = draft_logits(pair, requests, noise.flatten(0, 1))
    definition = Definition(pair.config, pair.weights, pair.target)
    for b in range(len(PREFIX_LENS)):
        x0 = noise[b].double()
        if num_steps == 1:
            x0 = x0 @ pair.model._noise_factor.double().T
        expected = definition.draft(requests.hidden[b], requests.anchors[b], x0)
        assert relative_error(logits[b], expected) < FLOAT64_TOLERANCE
        if pair.reference is not None:
            assert (
                relative_error(pair.reference_logits(requests, b, seed=b), expected)
                < FLOAT64_TOLERANCE
            )


class Definition:
    """A draft in float64, step by step as the method defines it; grouped KV heads are repeated."""

    def __init__(self, config: FlashMapConfig, weights: dict, target: Target) -> None:
        self.config, self.target = config, target
        self.w = {name: value.double() for name, value in weights.items()}
        self.E = target.embedding.double()

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def norm(self, weight: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        return self.w[weight] * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x (T, heads, D)`: channel pairs as complex numbers, turned by the position's angles."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        exponents = torch.arange(0, self.config.head_dim, 2).double() / self.config.head_dim
        angles = positions.double()[:, None, None] * self.config.rope_theta**-exponents
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def heads(
        self, name: str, x: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`(T, heads, D)`; queries and keys have positions, and are normed and rotated."""
        y = self.linear(f"{name}_proj", x).unflatten(-1, (-1, self.config.head_dim))
        if positions is not None:
            y = self.rotate(self.norm(f"{name}_norm.weight", y, self.config.qk_norm_eps), positions)
        return y.repeat_interleave(self.config.num_attention_heads // y.shape[1], dim=1)

    def attend(self, name: str, x, positions, source, source_positions) -> torch.Tensor:
        q = self.heads(f"{name}.q", x, positions)
        k = self.heads(f"{name}.k", source, source_positions)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.config.head_dim**0.5
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), self.heads(f"{name}.v", source))
        return self.linear(f"{name}.o_proj", out.flatten(1))

    def condition(self, name: str, time: float) -> torch.Tensor:
        half = self.config.time_embed_dim // 2
        angles = time * self.config.time_scale * 10000.0 ** -(torch.arange(half).double() / half)
        features = torch.cat([angles.cos(), angles.sin()])
        hidden = self.linear(f"{name}.linear_1", features)
        return self.linear(f"{name}.linear_2", hidden * hidden.sigmoid())

    def adaln(
        self, name: str, x: torch.Tensor, cond: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, shift, gate = self.linear(f"{name}.linear", cond * cond.sigmoid()).chunk(3)
        centred = x - x.mean(-1, keepdim=True)
        normed = (
            centred / (centred.square().mean(-1, keepdim=True) + self.config.layer_norm_eps).sqrt()
        )
        return normed * (1 + scale) + shift, gate

    def draft(
        self, target_hidden: torch.Tensor, anchor: torch.Tensor, x0: torch.Tensor
    ) -> torch.Tensor:
        """Logits `(K, V)`; `x0` is `(K, V)`, or already embedded `(K, H)` for one jump."""
        config, eps = self.config, self.config.rms_norm_eps
        entries = [
            self.norm("hidden_norm.weight", self.linear("fc", target_hidden.double()), eps),
            self.norm("anchor_norm.weight", self.linear("anchor_proj", self.E[anchor])[None], eps),
        ]
        context = torch.cat(entries)
        context_positions = torch.arange(context.shape[0])
        positions = context.shape[0] + torch.arange(config.block_size)
        grid = config.grid()
        for s, t in zip(grid, grid[1:], strict=False):
            embedded = x0 if len(grid) == 2 else x0 @ self.E
            weights = torch.full((1, VOCAB), 1.0 / VOCAB).double()
            if s > 0:
                weights = (x0 * s / max(1 - s, 1e-3) ** 2).softmax(-1)
            gate = self.w["noise_gate"] * (t - s if config.noise_gate == "jump" else 1.0)
            x = self.linear(
                "x_embed",
                self.norm("state_norm.weight", weights @ self.E, eps)
                + gate * self.norm("noise_norm.weight", embedded, eps),
            )
            cond = self.condition("time_embed", s) + self.condition("jump_embed", t)
            for i in range(config.num_hidden_layers):
                layer = f"layers.{i}"
                h, gate = self.adaln(f"{layer}.self_attn_adaln", x, cond)
                x = x + gate * self.attend(f"{layer}.self_attn", h, positions, h, positions)
                h, gate = self.adaln(f"{layer}.cross_attn_adaln", x, cond)
                attended = self.attend(
                    f"{layer}.cross_attn", h, positions, context, context_positions
                )
                x = x + gate * attended
                h, gate = self.adaln(f"{layer}.mlp_adaln", x, cond)
                hidden = self.linear(f"{layer}.mlp.fc1", h)
                hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
                x = x + gate * self.linear(f"{layer}.mlp.fc2", hidden)
            h, _ = self.adaln("final_adaln", x, cond)
            logits = self.linear("head", h) @ self.target.lm_head.double().T
            if t < 1:
                x0 = ((1 - t) * x0 + (t - s) * logits.softmax(-1)) / (1 - s)
        return logits


@pytest.mark.parametrize("rows", [VOCAB - 1, VOCAB], ids=["too-few-rows", "packed-columns"])
def test_a_partial_or_quantized_target_is_refused(rows: int) -> None:
    pair = make_pair()
    wrong = torch.zeros(rows, TARGET_HIDDEN if rows < VOCAB else TARGET_HIDDEN // 2)
    pair.target = Target(pair.target.embedding, wrong)
    with pytest.raises(ValueError, match="whole LM head .* serve the target without quantizing"):
        pair.attach()


def test_fused_weights_are_stored_once() -> None:
    model = make_pair().model
    for layer in model.layers:
        for fused, attention in (
            (model._context_kv_weight, layer.cross_attn),
            (None, layer.self_attn),
        ):
            storage = attention.k_proj.weight.untyped_storage().data_ptr()
            assert storage == attention.v_proj.weight.untyped_storage().data_ptr()
            if fused is not None:
                assert storage == fused.untyped_storage().data_ptr()


def test_quantization_of_the_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no --speculative-draft-model-quantization"):
        FlashMapDraftModel(FlashMapConfig(**draft_sizes()), quant_config=object())


@pytest.mark.parametrize(
    "head_dim, dtype", [(64, torch.float32), (80, torch.bfloat16)], ids=["float32", "D80"]
)
def test_cpu_context_attention_is_the_portable_one(head_dim: int, dtype: torch.dtype) -> None:
    from sglang.srt.speculative.flashmap.attention import select_context_attention

    chosen = select_context_attention("cpu", head_dim=head_dim, pool_dtype=dtype)
    assert type(chosen) is ContextAttention and chosen.name == "torch"


@pytest.mark.parametrize("jumps", [1, 2], ids=["one-jump", "two-jumps"])
def test_packed_weights_draft_the_same(jumps: int) -> None:
    pair = make_pair(num_steps=jumps)
    model = pair.model
    requests = Requests(pair.config)
    noise = pair.seeded_noise(len(PREFIX_LENS))
    positions = requests.slot_positions(pair.config.block_size)

    def draft() -> torch.Tensor:
        pool = pair.prepare(requests)
        return model.draft_logits(noise, positions, requests.context(pool)).clone()

    plain = draft()
    model.pack_weights()
    layer = model.layers[0]
    assert model.fc.weight.is_mkldnn
    assert all(product.weight.is_mkldnn for product in model.products())
    for weight in (layer.self_attn.q_proj.weight, layer.mlp.fc1.weight):
        assert weight.untyped_storage().nbytes() == 0
    assert relative_error(draft(), plain) < 1e-5 and model.derived_bytes() > 0
