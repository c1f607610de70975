"""Requests that ended in HTTP 500, or ended the server, when they were fuzzed are refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.request_bounds import MAX_SAMPLES, check_top_logprobs
from sglang.srt.sampling.sampling_params import SamplingParams

CHAT = dict(model="m", messages=[dict(role="user", content="Hello")])


@pytest.mark.parametrize("value", ["é", 21, True, ["json_object"]], ids=repr)
def test_a_response_format_is_an_object(value: Any) -> None:
    with pytest.raises(ValidationError, match="response_format"):
        ChatCompletionRequest(**CHAT, response_format=value)


def test_a_schema_beside_its_type_is_still_taken() -> None:
    request = ChatCompletionRequest(
        **CHAT, response_format=dict(type="json_schema", schema=dict(title="Age", type="integer"))
    )
    assert request.response_format.json_schema.name == "Age"


@pytest.mark.parametrize("schema", [None, "integer", 7], ids=repr)
def test_a_json_schema_needs_an_object(schema: Any) -> None:
    with pytest.raises(ValidationError, match="needs a schema, which is an object"):
        ChatCompletionRequest(**CHAT, response_format=dict(type="json_schema", schema=schema))


@pytest.mark.parametrize("count", [-1, 9, 2**31])
def test_more_likeliest_tokens_than_there_are(count: int) -> None:
    """Looking for them would end the server."""
    check_top_logprobs(8, vocab_size=8)
    check_top_logprobs(None, vocab_size=8)
    with pytest.raises(ValueError, match=f"asks for the {count} likeliest tokens, but there are 8"):
        check_top_logprobs(count, vocab_size=8)


@pytest.mark.parametrize("count", [0, -1, MAX_SAMPLES + 1, 10**12, 1.5, "3", True])
def test_samples_out_of_bounds(count: Any) -> None:
    """Copying the request so often would end the server."""
    request = GenerateReqInput(text="a", sampling_params=dict(n=count))
    with pytest.raises(
        ValueError, match=f"n, the number of samples, must be from 1 to {MAX_SAMPLES}"
    ):
        request.normalize_batch_and_arguments()


@pytest.mark.parametrize("count", [None, 1, 3])
def test_samples_within_bounds(count: int | None) -> None:
    request = GenerateReqInput(text="a", sampling_params=dict(n=count))
    request.normalize_batch_and_arguments()
    assert request.parallel_sample_num == (count or 1)


# --- aborts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stops, kept",
    [(dict(stop_token_ids=[7]), [5, 6, 7]), (dict(max_new_tokens=4), [5, 6, 7, 8]), ({}, None)],
    ids=["stop", "length", "none"],
)
def test_an_abort_keeps_nothing_after_an_end(stops: dict[str, Any], kept: list[int] | None) -> None:
    """An abort arrives while the block 6, 7, 8, 9, 7 is verified."""
    params = SamplingParams(**dict(max_new_tokens=20) | stops)
    params.normalize(None)
    with get_context().override_server_args():
        req = Req("rid", "text", array("q", (1, 2)), params, vocab_size=32)
        req.output_ids = array("q", (5, 6, 7, 8, 9, 7))
        req.to_finish = FINISH_ABORT()
        req.update_finish_state(5)
    assert isinstance(req.finished_reason, FINISH_ABORT) and req.to_finish is None
    assert list(req.output_ids_through_stop) == (kept or [5, 6, 7, 8, 9, 7])
