"""Weights in oneDNN's layout: the products, and which layers of a target get them."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers import packed_linear
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.packed_linear import (
    PackedHeadMethod,
    PackedLinearMethod,
    can_pack,
    linear,
    pack,
    pack_model,
)
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import nn

IN, OUT, VOCAB = 72, 200, 128
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.mark.parametrize("rows", [0, 1, 2, 9, 300])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).split(".")[1])
def test_product_is_that_of_the_row_major_weight(dtype: torch.dtype, bias: bool, rows: int) -> None:
    weight, x = torch.randn(OUT, IN, dtype=dtype), torch.randn(rows, IN, dtype=dtype)
    shift = torch.randn(OUT, dtype=dtype) if bias else None
    packed = pack(weight)
    assert packed.is_mkldnn == can_pack(weight)
    got = linear(x, packed, shift)
    expected = x.double() @ weight.double().T + (shift.double() if bias else 0.0)
    assert got.dtype == dtype and got.shape == (rows, OUT)
    assert torch.allclose(got.double(), expected, rtol=TOLERANCE[dtype], atol=60 * TOLERANCE[dtype])


def test_what_onednn_cannot_multiply_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    double, half = torch.randn(OUT, IN, dtype=torch.float64), torch.randn(OUT, IN).bfloat16()
    assert pack(double) is double
    assert can_pack(torch.randn(OUT, IN))
    monkeypatch.setattr(
        packed_linear.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False
    )
    assert pack(half) is half
    x = torch.randn(3, IN).bfloat16()
    assert torch.equal(linear(x, half), nn.functional.linear(x, half))


class Model(nn.Module):
    """A target with one linear layer of each kind that packing tells apart."""

    def __init__(self, *, tied: bool, fp32_head: bool = False) -> None:
        super().__init__()
        self.plain = ReplicatedLinear(IN, OUT, bias=True)
        self.quantized = ReplicatedLinear(IN, OUT, bias=False)
        self.quantized.quant_method = type("Quantized", (UnquantizedLinearMethod,), {})()
        self.embed = VocabParallelEmbedding(VOCAB, IN, enable_tp=False)
        self.lm_head = self.embed if tied else ParallelLMHead(VOCAB, IN, enable_tp=False)
        self.logits_processor = SimpleNamespace(
            use_fp32_lm_head=fp32_head, rl_on_policy_target=None
        )
        for parameter in self.parameters():
            parameter.requires_grad_(False).normal_()


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
def test_a_target_computes_the_same_packed(tied: bool) -> None:
    model = Model(tied=tied)
    x, ids = torch.randn(5, IN), torch.tensor([3, 0, 127])
    layers = (model.plain, model.quantized)

    def outputs() -> list[torch.Tensor]:
        table = model.embed.quant_method.embedding(model.embed, ids)
        return [*(layer.quant_method.apply(layer, x, layer.bias) for layer in layers), table]

    before = outputs()
    head = x @ model.lm_head.weight.T
    size = pack_model(model)
    assert size == 4 * (OUT * IN + VOCAB * IN)
    assert isinstance(model.plain.quant_method, PackedLinearMethod)
    assert model.plain.weight.is_mkldnn and not model.quantized.weight.is_mkldnn
    assert isinstance(model.lm_head.quant_method, PackedHeadMethod)
    # A table that is looked up keeps its rows; the head of its own is stored once.
    assert model.lm_head.weight.is_mkldnn != tied
    for old, new in zip(before, outputs(), strict=True):
        assert torch.allclose(old, new, rtol=1e-5, atol=1e-4)
    logits = model.lm_head.quant_method.apply(model.lm_head, x)
    assert torch.allclose(logits, head, rtol=1e-5, atol=1e-4)


def test_a_packed_weight_cannot_go_stale() -> None:
    model = Model(tied=True)
    pack_model(model)
    with pytest.raises(RuntimeError):
        model.plain.weight.data.copy_(torch.zeros(OUT, IN))


def test_upstream_hands_the_logits_to_a_packed_head() -> None:
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    model = Model(tied=True)
    head = model.lm_head
    assert not should_apply_lm_head_quant_method(head, head.quant_method)
    pack_model(model)
    assert should_apply_lm_head_quant_method(head, head.quant_method)


def test_a_head_in_another_precision_stays_upstreams() -> None:
    model = Model(tied=True, fp32_head=True)
    pack_model(model)
    assert type(model.lm_head.quant_method) is UnquantizedEmbeddingMethod
    assert model.plain.weight.is_mkldnn


PRODUCTS = """
import torch
from sglang.srt.layers.packed_linear import linear, pack
weights = [pack(torch.randn(64 * n, 64)) for n in range(1, 5)]

def growing() -> int:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))

before = growing()
for rows in range(2, 260):
    for weight in weights:
        linear(torch.randn(rows, 64), weight)
print((growing() - before) // 1024)
"""


@pytest.mark.skipif(not can_pack(torch.ones(1, 1)), reason="this oneDNN packs no float32")
def test_products_of_any_number_of_rows_leave_little_behind() -> None:
    """In a process of its own: the bound is read once."""
    environment = {name: value for name, value in os.environ.items() if "CAPACITY" not in name}
    run = subprocess.run(
        [sys.executable, "-c", PRODUCTS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) < 300, "MB; without a bound they were 500"
