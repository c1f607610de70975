"""Requests that ended in HTTP 500 when they were fuzzed are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

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
