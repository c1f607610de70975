"""Drafts with e4m3 weights and with an e4m3 context pool: near the plain draft, nothing kept
twice."""

from __future__ import annotations

import pytest
import torch
from draft_pair import PREFIX_LENS, VOCAB, DraftPair, Pool, Requests, relative_error

RANKING = torch.arange(VOCAB)
SIZE = 208  # of a draft vocabulary that FP8 tensor cores take


def make_pair(dtype: torch.dtype) -> DraftPair:
    return DraftPair(dtype=dtype, draft_vocab_size=SIZE, ranking=RANKING, intermediate_size=256)


def logits_of(pair: DraftPair, requests: Requests, noise: torch.Tensor, pool: Pool) -> torch.Tensor:
    positions = requests.slot_positions(pair.config.block_size)
    return pair.model.draft_logits(noise, positions, requests.context(pool)).float()


@pytest.mark.parametrize("form", ["cholesky", "folded"])
def test_fp8_weights(form: str) -> None:
    torch.manual_seed(0)
    pair = make_pair(torch.bfloat16)
    requests = Requests(pair.config)
    requests.hidden = [hidden.bfloat16() for hidden in requests.hidden]
    noise = pair.seeded_noise(len(PREFIX_LENS)).float()
    pair.attach(SIZE, noise=form)
    plain = logits_of(pair, requests, noise, pair.prepare(requests))
    pair.attach(SIZE, noise=form, draft_quantization="fp8")
    quantized = logits_of(pair, requests, noise, pair.prepare(requests))
    # e4m3 is off by 1.8 % on average, in each of two layers' six products.
    assert 1e-3 < relative_error(quantized, plain) < 0.15
    model = pair.model
    products = model.products()
    assert all(p.weight.dtype == torch.float8_e4m3fn for p in products if p.weight.numel())
    freed = [name for name, p in model.named_parameters() if p.numel() == 0]
    assert len(freed) == 2 + 2 * (2 * 4 + 2) and "x_embed.weight" in freed
    assert model.fc.weight.dtype == torch.bfloat16 and model.fc.weight.numel()


def test_fp8_weights_need_16_bits() -> None:
    with pytest.raises(ValueError, match="needs a draft of 16 bits, and this one is float32"):
        make_pair(torch.float32).attach(SIZE, draft_quantization="fp8")


def test_e4m3_context_pool() -> None:
    pair = make_pair(torch.float32)
    requests = Requests(pair.config)
    noise = pair.seeded_noise(len(PREFIX_LENS))
    plain = logits_of(pair, requests, noise, pair.prepare(requests))
    pool = Pool(pair.config, requests.num_slots, torch.float8_e4m3fn)
    requests.write_context(pair.model, pool)
    requests.write_anchors(pair.model, pool)
    assert 1e-4 < relative_error(logits_of(pair, requests, noise, pool), plain) < 0.05
