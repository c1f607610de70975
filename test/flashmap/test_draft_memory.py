"""The report of a draft's memory counts every tensor once."""

from __future__ import annotations

import pytest
import torch
from draft_pair import VOCAB, DraftPair, Pool
from sglang.srt.speculative.flashmap.memory import GIB, DraftMemory, parameter_bytes, pool_bytes


def test_weights_are_counted_once() -> None:
    pair = DraftPair()
    expected = sum(4 * weight.numel() for weight in pair.weights.values())
    assert parameter_bytes(pair.model) == expected  # also those that views share
    assert pair.model.weight_bytes() == expected
    derived = pair.model.derived_bytes()
    pair.model.pack_weights()
    assert pair.model.weight_bytes() == expected
    assert pair.model.derived_bytes() == derived


@pytest.mark.parametrize("form", ["cholesky", "folded"])
def test_precomputed_weights(form: str) -> None:
    pair = DraftPair()
    pair.attach(noise=form)
    hidden, dim = pair.config.target_hidden_size, pair.config.hidden_size
    head = VOCAB * dim + VOCAB
    noise = hidden * hidden if form == "cholesky" else hidden * dim + dim
    assert pair.model.derived_bytes() == 4 * (head + noise + hidden)


def test_fp8_replaces_the_weights() -> None:
    pair = DraftPair(dtype=torch.bfloat16, intermediate_size=256)
    before = pair.model.weight_bytes(), pair.model.derived_bytes()
    pair.attach(draft_quantization="fp8")
    after = pair.model.weight_bytes(), pair.model.derived_bytes()
    assert after[0] < 0.75 * before[0] and after[1] <= before[1]


def test_units() -> None:
    pair = DraftPair()
    pool = Pool(pair.config, slots=100)
    size = pool_bytes(pool.keys, pool.values)
    assert size == 2 * 2 * 100 * 2 * 64 * 4
    memory = DraftMemory(weight=GIB, precomputed=GIB // 2, kvcache=size, graph=0, scratch=0)
    assert memory.gigabytes()["precomputed"] == 0.5
    assert str(memory).startswith("weight 1.000 GB, precomputed 0.500 GB, kvcache 0.000 GB")
