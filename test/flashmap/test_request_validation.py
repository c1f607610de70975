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


def request(
    params: dict[str, Any] | None = None, ids: tuple[int, ...] = (1, 2), **fields: Any
) -> Req:
    return Req("rid", "text", array("q", ids), SamplingParams(**params or {}), **fields)


@pytest.mark.parametrize(
    "params",
    [
        {},
        dict(temperature=0.0),
        dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1),
        dict(sampling_seed=5),
        dict(logit_bias={"3": -100.0}, stop=["x"], max_new_tokens=1),
        dict(json_schema='{"type": "object"}'),
        dict(frequency_penalty=0.1, presence_penalty=-0.1, repetition_penalty=1.1),
        dict(min_new_tokens=1),
        dict(custom_params=dict(token_ids=[5])),
        dict(n=4, ignore_eos=True, skip_special_tokens=False),
    ],
    ids=[
        "defaults",
        "greedy",
        "filters",
        "seed",
        "bias-and-stop",
        "schema",
        "penalties",
        "minimum",
        "processor",
        "n",
    ],
)
def test_honoured(params: dict) -> None:
    fields = dict(custom_logit_processor="{}") if "custom_params" in params else {}
    fields |= dict(return_logprob=True, lora_id="adapter")
    assert validate_flashmap_request(request(params, **fields)) is None


REFUSED: dict[str, dict[str, Any]] = {
    "return_hidden_states": dict(return_hidden_states=True),
    "return_sampling_mask": dict(return_sampling_mask=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert validate_flashmap_request(request(**REFUSED[name])) == (
        f"FLASHMAP speculative decoding does not support {name}; leave it out or use a server "
        "without --speculative-algorithm."
    )


def test_everything_refused_is_named_at_once() -> None:
    message = validate_flashmap_request(
        request(return_hidden_states=True, return_sampling_mask=True)
    )
    assert "support return_hidden_states, return_sampling_mask; leave them out" in message


@pytest.mark.parametrize(
    "ids, outside", [((1, 59), None), ((60, 2), 60), ((1, -1), -1)], ids=["last", "past", "below"]
)
def test_prompt_tokens_outside_the_vocabulary(ids: tuple, outside: int | None) -> None:
    message = validate_flashmap_request(request(ids=ids, vocab_size=60))
    if outside is None:
        assert message is None
    else:
        assert f"token id {outside}, but the model's ids go from 0 to 59; send ids of" in message
