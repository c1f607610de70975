"""Which logits of verify forwards stay in 16 bits, and which requests need them in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sampling_fields import NO_TOP_K, requests_of, sampling_info
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.flashmap import target as target_module
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.plan import StepRules
from sglang.srt.speculative.flashmap.target import TargetVerifier, leave_logits_narrow
from sglang.srt.speculative.flashmap.worker import FlashMapWorker

ROWS, HIDDEN, VOCAB, HEAD_ROWS = 6, 16, 50, 64


class Target(torch.nn.Module):
    """A head wider than its vocabulary, and a processor as it is without parallelism."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> None:
        super().__init__()
        processor = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(processor)
        options = dict(
            vocab_size=VOCAB,
            logit_scale=None,
            final_logit_softcapping=None,
            use_fp32_lm_head=False,
            use_fp32_lm_head_output=False,
            use_attn_tp_group=False,
            do_tensor_parallel_all_gather=False,
            do_tensor_parallel_all_gather_dp_attn=False,
            defer_verify_gather=False,
            rl_on_policy_target=None,
            verify_logits=None,
        )
        for name, value in (options | fields).items():
            setattr(processor, name, value)
        self.logits_processor = processor
        weight = torch.randn(HEAD_ROWS, HIDDEN).to(dtype)
        self.head = SimpleNamespace(weight=weight, quant_method=None)

    def leave_narrow(self) -> int:
        return leave_logits_narrow(self, self.head.weight, ROWS)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, mode: ForwardMode) -> torch.Tensor:
        metadata = SimpleNamespace(forward_mode=mode, next_token_logits_buffer=None)
        return self.logits_processor._get_logits(hidden, self.head, metadata)


def test_only_verify_forwards_that_fit_stay_narrow() -> None:
    target, plain = Target(), Target()
    plain.head = target.head
    assert target.leave_narrow() == ROWS * HEAD_ROWS * 2
    for mode, rows, narrow in (
        (ForwardMode.TARGET_VERIFY, ROWS, True),
        (ForwardMode.TARGET_VERIFY, 2, True),
        (ForwardMode.TARGET_VERIFY, ROWS + 1, False),
        (ForwardMode.DECODE, 2, False),
        (ForwardMode.EXTEND, 2, False),
    ):
        hidden = torch.randn(rows, HIDDEN).bfloat16()
        logits, expected = target.logits(hidden, mode), plain.logits(hidden, mode)
        assert logits.dtype == (torch.bfloat16 if narrow else torch.float32)
        assert expected.dtype == torch.float32 and expected.shape == (rows, VOCAB)
        assert torch.equal(logits.float(), expected)


def test_a_scale_is_applied_in_16_bits_as_ever() -> None:
    target, plain = Target(logit_scale=0.3), Target(logit_scale=0.3)
    plain.head = target.head
    target.leave_narrow()
    hidden = torch.randn(ROWS, HIDDEN).bfloat16()
    logits, expected = (t.logits(hidden, ForwardMode.TARGET_VERIFY) for t in (target, plain))
    assert logits.dtype == torch.bfloat16 and torch.equal(logits.float(), expected)


@pytest.mark.parametrize(
    "fields",
    [
        dict(final_logit_softcapping=30.0),
        dict(use_fp32_lm_head=True),
        dict(use_fp32_lm_head_output=True),
        dict(do_tensor_parallel_all_gather=True),
        dict(rl_on_policy_target="fsdp"),
        dict(dtype=torch.float32),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_targets_that_do_more_than_a_cast_keep_float32(fields: dict[str, Any]) -> None:
    target = Target(**fields)
    assert target.leave_narrow() == 0 and target.logits_processor.verify_logits is None


def test_wide_logits_are_the_float32_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "cast_to_float32_logits", lambda x, out: out.copy_(x))
    shared = torch.zeros(9, VOCAB)
    pool = SimpleNamespace(get_logits_buffer=lambda vocab, rows: shared[:rows])
    runner = SimpleNamespace(graph_shared_output=pool)
    verifier = TargetVerifier(SimpleNamespace(model_runner=runner), 3)
    narrow = torch.randn(ROWS, HEAD_ROWS).bfloat16()[:, :VOCAB]
    wide = verifier.wide_logits(narrow)
    assert wide.dtype == torch.float32 and torch.equal(wide, narrow.float())
    assert wide.data_ptr() == shared.data_ptr()
    assert verifier.wide_logits(wide) is wide


def info_of(temperatures: list[float], top_ks: list[int], **fields: Any) -> SimpleNamespace:
    info = sampling_info(temperatures, top_ks=top_ks)
    vars(info).update(dict(logit_bias=None, has_custom_logit_processor=False) | fields)
    return info


GREEDY = info_of([1.0, 1.0], [1, 1])
MIXED = info_of([1.0, 0.7], [1, NO_TOP_K])
BIASED = info_of([1.0, 1.0], [1, 1], logit_bias=torch.zeros(2, VOCAB))
PROCESSED = info_of([1.0, 1.0], [1, 1], has_custom_logit_processor=True)


@pytest.mark.parametrize(
    "info, batch_fields, penalties, expected",
    [
        (None, {}, None, False),
        (GREEDY, {}, None, False),
        (MIXED, {}, None, True),
        (BIASED, {}, None, True),
        (PROCESSED, {}, None, True),
        (GREEDY, dict(has_grammar=True), None, True),
        (GREEDY, dict(return_logprob=True), None, True),
        (GREEDY, {}, SimpleNamespace(), True),
    ],
    ids="none greedy mixed bias processor grammar logprobs penalties".split(),
)
@pytest.mark.parametrize("threshold", [0.0, 1.0], ids=["rejection", "match"])
def test_requests_that_need_float32(
    info: Any, batch_fields: dict, penalties: Any, expected: bool, threshold: float
) -> None:
    serve = FlashMapServeConfig(
        block_size=4,
        verify_width=4,
        grid=(0.0, 1.0),
        draft_vocab_size=0,
        block_verification=False,
        tree_candidates=2 if threshold else 0,
        tree_temperature=threshold,
    )
    fields = dict(has_grammar=False, return_logprob=False) | batch_fields
    batch = SimpleNamespace(
        reqs=requests_of(info, 2), sampling_info=info, seq_lens=torch.arange(2), **fields
    )
    worker = FlashMapWorker.__new__(FlashMapWorker)
    assert worker._needs_float32(batch, StepRules.of(batch, serve), penalties) is expected
