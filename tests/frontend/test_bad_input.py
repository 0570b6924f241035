"""The bad-input table, row by row: status, error.type, error.param, error.code. Never a 5xx, never a harmed server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_tokenizer_process import MAX_MODEL_LEN, VOCAB_SIZE
from frontend_harness import MODEL, RunningFrontend, chat_body
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringserve.messages.requests import GenerateRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WEATHER = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The OpenAI error body, checked for shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert all(error[name] is None or isinstance(error[name], str) for name in ("code", "param"))
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "a"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": "a" * 4097}, "stop"),
        ({"stop": ["a", "é" * 4097]}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"min_tokens": 1, "stop_token_ids": list(range(VOCAB_SIZE))}, "stop_token_ids"),
        ({"min_tokens": 1, "stop_token_ids": list(range(1, VOCAB_SIZE))}, "stop_token_ids"),  # 0 is the model's end
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a", " "]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": [5]}, "bad_words[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        ({"min_tokens": 1, "allowed_token_ids": [0]}, "allowed_token_ids"),  # the model's end
        ({"min_tokens": 1, "allowed_token_ids": [4, 5], "stop_token_ids": [5, 4]}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": -5}, "deadline_ms"),
        ({"deadline_ms": 1e9}, "deadline_ms"),
        ({"deadline_ms": "soon"}, "deadline_ms"),
        ({"deadline_at": 5}, "deadline_at"),
        ({"deadline_at": 1e300}, "deadline_at"),
        ({"deadline_at": 4102444800, "deadline_ms": 5}, "deadline_at"),
        ({"target_ttft_ms": 0}, "target_ttft_ms"),
        ({"target_tpot_ms": -1}, "target_tpot_ms"),
        ({"deadline": 5}, "deadline"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nonsense": True}}, "stream_options.nonsense"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"request_id": "a b"}, "request_id"),
        ({"model": 5}, "model"),
        # what later versions bring is refused by name
        ({"tools": []}, "tools"),
        ({"tools": [WEATHER]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "w"}}}, "tool_choice"),
        ({"functions": [{"name": "w"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"temprature": 1}, "temprature"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_parameter_out_of_range(http: httpx.Client, path: str, more: dict[str, Any], param: str) -> None:
    body = chat_body(**more) if path == CHAT else {"prompt": "a", "max_tokens": 3, **more}
    error = error_of(http.post(path, json=body), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat_body(messages=[]), "messages"),
        (chat_body(messages="hi"), "messages"),
        (chat_body(messages=["hi"]), "messages[0]"),
        ({"model": MODEL}, "messages"),
        (chat_body(messages=[{"content": "a"}]), "messages[0].role"),
        (chat_body(messages=[{"role": "king", "content": "a"}]), "messages[0].role"),
        (chat_body(messages=[{"role": "user"}]), "messages[0].content"),
        (chat_body(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
        (chat_body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
        (chat_body(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (chat_body(messages=[{"role": "tool", "content": "x"}]), "messages[0].role"),
        (chat_body(messages=[{"role": "assistant", "content": "x", "tool_calls": [{}]}]), "messages[0].tool_calls"),
        (chat_body(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat_body(top_logprobs=2), "top_logprobs"),
        (chat_body(logprobs=5), "logprobs"),
        (chat_body(max_tokens=0), "max_tokens"),
        (chat_body(max_completion_tokens=0), "max_completion_tokens"),
        (chat_body(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
        (chat_body(echo=True), "echo"),
        (chat_body(chat_template_kwargs={"a": 2**64}), "chat_template_kwargs"),
        (chat_body(chat_template_kwargs={"a": [{"b": -(2**63) - 1}]}), "chat_template_kwargs"),
        (chat_body(chat_template_kwargs={"a": 10**400}), "chat_template_kwargs"),
    ],
)
def test_bad_chat(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    error = error_of(http.post(CHAT, json=body), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": ["a", [5]]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1, 2**80]]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": ["a"] * 600}, "prompt"),
    ],
)
def test_bad_completion(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    error = error_of(http.post(TEXT, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert error["param"].partition("[")[0] == param


@pytest.mark.parametrize(
    "off",
    [
        {"tools": None},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"best_of": 1},
        {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
        {"modalities": ["text"]},
        {"temperature": 0, "n": 2},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"stop": ["a", "b", "c", "d"]},
        {"logit_bias": {}},
        {"top_k": -1},
    ],
)
def test_harmless_parameters_are_accepted(http: httpx.Client, off: dict[str, Any]) -> None:
    assert http.post(CHAT, json=chat_body(**off)).status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [-1], 5])
def test_too_many_prompts_are_refused_before_each_is_looked_at(http: httpx.Client, prompt: Any) -> None:
    error = error_of(http.post(TEXT, json={"prompt": ["a", *[prompt] * 600]}), 400)
    assert error["param"] == "prompt"
    assert "at most" in error["message"]


def test_unknown_model(http: httpx.Client) -> None:
    for path, body in ((CHAT, chat_body(model="other")), (TEXT, {"model": "other", "prompt": "a"})):
        error = error_of(http.post(path, json=body), 404)
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    assert error_of(http.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_prompt_too_long_is_refused_and_max_tokens_is_clamped(http: httpx.Client) -> None:
    error = error_of(http.post(TEXT, json={"prompt": [5] * MAX_MODEL_LEN}), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, " in error["message"]
    error = error_of(http.post(TEXT, json={"prompt": [5] * MAX_MODEL_LEN, "stream": True}), 400)
    assert error["param"] == "prompt"
    answer = http.post(TEXT, json={"prompt": [5] * (MAX_MODEL_LEN - 2), "max_tokens": 100})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert answer.json()["notice"].startswith("max_tokens was reduced from 100 to 2")
    assert answer.headers["x-ringserve-notice"] == answer.json()["notice"]
    assert "notice" not in http.post(TEXT, json={"prompt": "a", "max_tokens": 2}).json()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b"5",
        b'{"messages": 1e999}',
        b'{"messages": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud800\\u0041"}',
        b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=lambda data: repr(data[:24]),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_malformed_json(http: httpx.Client, path: str, data: bytes) -> None:
    error = error_of(http.post(path, content=data, headers={"content-type": "application/json"}), 400)
    assert error["type"] == "invalid_request_error"


def test_content_type(http: httpx.Client) -> None:
    data = json.dumps({"prompt": "a"}).encode()
    error_of(http.post(TEXT, content=data, headers={"content-type": "text/plain"}), 400)
    error_of(http.post(TEXT, content=data, headers={"content-type": "application/x-www-form-urlencoded"}), 400)
    for good in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert http.post(TEXT, content=data, headers={"content-type": good}).status_code == 200
    assert http.post(TEXT, content=data).status_code == 200  # nothing said


def test_escaped_nul_reaches_the_engine(http: httpx.Client, frontend: RunningFrontend) -> None:
    assert http.post(TEXT, content=b'{"prompt": "a\\u0000b"}').status_code == 200
    assert frontend.fake.of_kind(GenerateRequest)[-1].prompt.text == "a\x00b"


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    assert error_of(http.get("/nowhere"), 404)["code"] == "unknown_url"
    assert error_of(http.get("/v1/models/"), 404)["code"] in ("unknown_url", "model_not_found")
    for method, path in (
        ("GET", CHAT),
        ("DELETE", TEXT),
        ("OPTIONS", CHAT),
        ("POST", "/health"),
        ("PUT", "/v1/models"),
    ):
        answer = http.request(method, path)
        error_of(answer, 405)
        assert answer.headers["allow"]
    head = http.head("/health")
    assert (head.status_code, head.content) == (200, b"")


def test_lone_surrogates_in_parameters(http: httpx.Client) -> None:
    for field in ("stop", "model", "request_id", "cache_salt", "\\ud800"):
        data = b'{"prompt": "a", "%s": "\\ud800"}' % field.encode()
        error_of(http.post(TEXT, content=data), 400)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
NAMES = [
    "prompt", "messages", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "logprobs",
    "top_logprobs", "stop_token_ids", "min_tokens", "tools", "echo", "stream_options", "chat_template_kwargs", "tokens",
]  # fmt: skip
quick = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@quick
@given(data=st.binary(max_size=200), path=st.sampled_from([CHAT, TEXT, "/tokenize", "/detokenize"]))
def test_random_bytes(http: httpx.Client, data: bytes, path: str) -> None:
    error_of(http.post(path, content=data), 400)


@quick
@given(
    path=st.sampled_from([CHAT, TEXT, "/tokenize", "/detokenize"]),
    body=st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4),
    valid=st.booleans(),
)
def test_random_json(http: httpx.Client, path: str, body: dict[str, Any], valid: bool) -> None:
    if valid:
        body = (
            {**body, "max_tokens": 2, "messages": chat_body()["messages"]} if path == CHAT else {"prompt": "a", **body}
        )
    answer = http.post(path, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400), (body, answer.text)
    if answer.status_code == 400:
        error_of(answer, 400)


def test_nothing_is_left(http: httpx.Client, frontend: RunningFrontend) -> None:
    assert http.post(CHAT, json=chat_body()).status_code == 200
    frontend.wait_until(lambda: not any(frontend.actor.dispatcher.statistics().values()))
