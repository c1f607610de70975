"""The trainable network computes what the flashmap package computes."""

from __future__ import annotations

import flashmap
import pytest
import torch
from flashmap.modeling_flashmap import FlashMapCache
from train.draft_config import FlashMapConfig, config_keys
from train.network import Blocks, DraftNetwork
from train.noise import noised, read_state, uniform_posterior

VOCAB, HIDDEN, LAYERS = 97, 24, [0, 2]
GRID = [0.0, 0.55, 1.0]


def both(noise_gate: str) -> tuple[DraftNetwork, flashmap.FlashMapDraftModel]:
    torch.manual_seed(0)
    config = FlashMapConfig(
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        target_layer_ids=LAYERS,
        block_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        cond_dim=16,
        time_embed_dim=8,
        noise_gate=noise_gate,
        jump_grids={"1": [0.0, 1.0], "2": GRID},
    )
    network = DraftNetwork(config).double()
    for parameter in network.parameters():
        scale = 0.5 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.data = scale * torch.randn(parameter.shape).double() + (parameter.dim() == 1)
    package = flashmap.FlashMapDraftModel(
        flashmap.FlashMapConfig(**config_keys(config, "float32"))
    )
    package.load_state_dict(network.state_dict())  # the names are the checkpoint's
    return network.float(), package.float().eval()


@pytest.mark.parametrize("noise_gate", ["jump", "constant"])
def test_two_jumps_equal_the_package(noise_gate: str) -> None:
    network, package = both(noise_gate)
    embed, head = torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    batch, length, slots = 2, 13, 4
    tokens = torch.randint(VOCAB, (batch, length))
    hidden = torch.randn(batch, length, len(LAYERS) * HIDDEN)
    anchors = torch.tensor([[1, 7, 7], [3, 12, 4]])
    blocks = Blocks(hidden, anchors, embed(tokens.gather(1, anchors)).detach())
    state = torch.randn(batch, 3, slots, VOCAB)

    expected = torch.empty_like(state)
    for row in range(batch):
        for block in range(3):
            anchor = int(anchors[row, block])
            cache = FlashMapCache(package.config, 1, length + slots + 1, dtype=torch.float32)
            package.extend_context(cache, hidden[row : row + 1, :anchor])
            expected[row, block] = package.draft(
                tokens[row, anchor][None], cache, embed, head, 2, noise=state[row, block][None]
            )[0].detach()

    with torch.no_grad():
        for s, t in zip(GRID[:-1], GRID[1:]):
            times = torch.full(state.shape[:3], s).flatten()
            terms = read_state(state.flatten(0, 2), times, embed.weight)
            posterior, linear = (term.view(*state.shape[:3], HIDDEN) for term in terms)
            start = torch.full((batch, 3), s)
            logits = head(network(posterior, linear, start, torch.full_like(start, t), blocks))
            state = ((1 - t) * state + (t - s) * logits.softmax(-1)) / (1 - s)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_network_is_one_graph() -> None:
    network, _ = both("jump")
    blocks = Blocks(torch.randn(1, 8, 48), torch.tensor([[2, 5]]), torch.randn(1, 2, HIDDEN))
    inputs = (torch.randn(HIDDEN), torch.randn(1, 2, 4, HIDDEN), torch.zeros(1, 2))
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    got = compiled(*inputs, torch.ones(1, 2), blocks)
    torch.testing.assert_close(got, network(*inputs, torch.ones(1, 2), blocks))


def test_noised_state_lies_on_the_path() -> None:
    tokens, times = torch.tensor([5, 0]), torch.tensor([0.9, 0.25])
    noise = noised(tokens, torch.zeros(2), VOCAB, torch.Generator().manual_seed(0))
    state = noised(tokens, times, VOCAB, torch.Generator().manual_seed(0))
    clean = torch.nn.functional.one_hot(tokens, VOCAB)
    expected = (1 - times)[:, None] * noise + times[:, None] * (noise * 0 + clean)
    torch.testing.assert_close(state, expected)


def test_uniform_posterior_is_that_of_any_noise() -> None:
    embedding = torch.randn(VOCAB, HIDDEN)
    posterior, _ = read_state(torch.randn(3, VOCAB), torch.zeros(3), embedding)
    torch.testing.assert_close(posterior, uniform_posterior(embedding).expand(3, -1))
