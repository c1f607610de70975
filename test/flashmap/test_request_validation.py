"""Which request parameters FLASHMAP honours, on upstream's own request object."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.flashmap.request import validate_flashmap_request


@pytest.fixture(autouse=True)
def _published() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def request(params: dict[str, Any] | None = None, **fields: Any) -> Req:
    return Req("rid", "text", array("q", [1, 2]), SamplingParams(**params or {}), **fields)


@pytest.mark.parametrize(
    "params",
    [
        {},
        dict(temperature=0.0),
        dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1),
        dict(sampling_seed=5),
        dict(logit_bias={"3": -100.0}, stop=["x"], max_new_tokens=1),
        dict(json_schema='{"type": "object"}'),
        dict(n=4, ignore_eos=True, skip_special_tokens=False),
    ],
    ids=["defaults", "greedy", "filters", "seed", "bias-and-stop", "schema", "n"],
)
def test_honoured(params: dict) -> None:
    assert validate_flashmap_request(request(params, return_logprob=True)) is None


REFUSED: dict[str, tuple[dict, dict]] = {
    "frequency_penalty": (dict(frequency_penalty=0.1), {}),
    "presence_penalty": (dict(presence_penalty=-0.1), {}),
    "repetition_penalty": (dict(repetition_penalty=1.1), {}),
    "min_new_tokens": (dict(min_new_tokens=1), {}),
    "custom_logit_processor": ({}, dict(custom_logit_processor="{}")),
    "return_hidden_states": ({}, dict(return_hidden_states=True)),
    "return_sampling_mask": ({}, dict(return_sampling_mask=True)),
    "a LoRA adapter": ({}, dict(lora_id="adapter")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    params, fields = REFUSED[name]
    assert validate_flashmap_request(request(params, **fields)) == (
        f"FLASHMAP speculative decoding does not support {name}; leave it out or use a server "
        "without --speculative-algorithm."
    )


def test_everything_refused_is_named_at_once() -> None:
    params = dict(frequency_penalty=1.0, min_new_tokens=3)
    message = validate_flashmap_request(request(params, custom_logit_processor="{}"))
    assert "frequency_penalty, min_new_tokens, custom_logit_processor; leave them out" in message
