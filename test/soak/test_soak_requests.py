"""Requests that ended in HTTP 500, or ended the server, when they were fuzzed are refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.flashmap.request import validate_flashmap_request

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
    with get_context().override_server_args():
        fields = dict(return_logprob=True, top_logprobs_num=count, vocab_size=8)
        refused = Req("rid", "text", array("q", (1, 2)), SamplingParams(), **fields)
        served = Req(
            "rid", "text", array("q", (1, 2)), SamplingParams(), **fields | dict(top_logprobs_num=8)
        )
        assert f"asks for the {count} likeliest tokens" in validate_flashmap_request(refused)
        assert validate_flashmap_request(served) is None
