"""Answers against what OpenAI's own schema requires of them (the parts that matter here, in our own words)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from frontend_harness import chat_body
from jsonschema import Draft202012Validator

STRING, INTEGER, NUMBER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "null"}
FINISH = {"enum": ["stop", "length", "tool_calls", "content_filter", "function_call"]}


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, NULL]}


def several(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


CANDIDATE = {"token": STRING, "logprob": NUMBER, "bytes": maybe(several(INTEGER))}
CHAT_LOGPROBS = maybe(
    record(
        {
            "content": maybe(several(record({**CANDIDATE, "top_logprobs": several(record(CANDIDATE))}))),
            "refusal": maybe(several(record(CANDIDATE))),
        }
    )
)
USAGE = record({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER})
MESSAGE = record({"role": {"const": "assistant"}, "content": maybe(STRING), "refusal": maybe(STRING)})


def answer(name: str, choice: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    head = {"id": STRING, "object": {"const": name}, "created": INTEGER, "model": STRING}
    return record({**head, "choices": several(choice)}, usage=usage)


CHAT = answer(
    "chat.completion",
    record({"index": INTEGER, "finish_reason": FINISH, "message": MESSAGE, "logprobs": CHAT_LOGPROBS}),
    USAGE,
)
DELTA = record({}, role={"const": "assistant"}, content=maybe(STRING))
CHAT_CHUNK = answer(
    "chat.completion.chunk",
    record({"index": INTEGER, "finish_reason": maybe(FINISH), "delta": DELTA}, logprobs=CHAT_LOGPROBS),
    maybe(USAGE),
)
TEXT_LOGPROBS = maybe(
    record(
        {},
        tokens=several(STRING),
        token_logprobs=several(NUMBER),
        text_offset=several(INTEGER),
        top_logprobs=several({"type": "object", "additionalProperties": NUMBER}),
    )
)
COMPLETION = answer(
    "text_completion",
    record({"index": INTEGER, "finish_reason": FINISH, "text": STRING, "logprobs": TEXT_LOGPROBS}),
    USAGE,
)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}])
def test_chat(http: httpx.Client, more: dict[str, Any]) -> None:
    Draft202012Validator(CHAT).validate(http.post("/v1/chat/completions", json=chat_body(**more)).json())
    streamed = http.post(
        "/v1/chat/completions", json=chat_body(stream=True, stream_options={"include_usage": True}, **more)
    )
    frames = [frame.removeprefix("data: ") for frame in streamed.text.split("\n\n") if frame]
    assert len(frames) > 5
    for frame in frames[:-1]:
        Draft202012Validator(CHAT_CHUNK).validate(json.loads(frame))


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 2}])
def test_completion(http: httpx.Client, more: dict[str, Any]) -> None:
    Draft202012Validator(COMPLETION).validate(http.post("/v1/completions", json={"prompt": "a", **more}).json())
