"""What the engine is asked for: every default filled in, prompts as they were meant."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest
from frontend_harness import RunningFrontend, chat_body

from ringserve.messages.columns import pack_f32, pack_i32
from ringserve.messages.prompts import TokenPrompt
from ringserve.messages.requests import GenerateRequest


@pytest.fixture
def plan(frontend: RunningFrontend, http: httpx.Client) -> Any:
    """Ask, and see the GenerateRequest."""

    def ask(path: str, body: dict[str, Any]) -> GenerateRequest:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        request = frontend.fake.of_kind(GenerateRequest)[-1]
        assert isinstance(request, GenerateRequest)
        return request

    return ask


def test_defaults_are_the_models(plan: Any) -> None:
    request = plan("/v1/chat/completions", chat_body())
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 0, 0.0)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.repetition_penalty) == (-1, -1, 1.0)
    assert (request.n, request.priority, request.resumed, request.cache_salt) == (1, 0, (), "")
    assert request.tenant == ""
    assert request.received_ns <= request.sent_ns
    again = plan("/v1/chat/completions", chat_body())
    assert again.sampling.seed != sampling.seed  # drawn here
    assert again.request_id != request.request_id


def test_max_tokens(plan: Any) -> None:
    assert plan("/v1/completions", {"prompt": "a"}).max_tokens == 16
    body = chat_body()
    del body["max_tokens"]
    assert plan("/v1/chat/completions", body).max_tokens is None
    assert plan("/v1/chat/completions", chat_body(max_tokens=9, max_completion_tokens=4)).max_tokens == 4
    assert plan("/v1/chat/completions", chat_body(max_tokens=10**30)).max_tokens == 2**31 - 1


def test_what_is_given_travels(plan: Any) -> None:
    more = {
        "seed": -1,
        "temperature": 0,
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"7": 100, "3": -2.5},
        "min_tokens": 2,
        "stop": "x",
        "stop_token_ids": [4, 5],
        "allowed_token_ids": [9, 4, 6, 9],
        "bad_words": ["two words", " b"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": -5,
        "cache_salt": "ours",
        "user": "eve" * 100,
        "n": 2,
    }
    request = plan("/v1/completions", {"prompt": [1, 2], "max_tokens": 3, "logprobs": 0, "echo": True, **more})
    sampling, output = request.sampling, request.output
    assert request.prompt == TokenPrompt(pack_i32([1, 2]))
    assert (sampling.seed, sampling.temperature, sampling.top_k) == (2**64 - 1, 0.0, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1.0, 2.0, 1.2)
    assert (sampling.logit_bias_ids, sampling.logit_bias_values) == (pack_i32([3, 7]), pack_f32([-2.5, 100]))
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (2, pack_i32([4, 5]), True)
    assert sampling.allowed_token_ids == pack_i32([4, 6, 9])
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, 0)
    assert output.bad_words == ("two words", " b")
    assert (output.stop, output.include_stop_str_in_output) == (("x",), True)
    assert (output.skip_special_tokens, output.echo) == (False, True)
    assert (request.n, request.priority, request.cache_salt) == (2, -5, "ours")
    assert request.tenant == "sha256:" + hashlib.sha256(b"eve" * 100).hexdigest()  # long names stay apart


def test_conversations(plan: Any) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "eve"},
        {"role": "assistant", "content": "so", "refusal": None, "tool_calls": []},
    ]
    prompt = plan(
        "/v1/chat/completions",
        chat_body(messages=messages, continue_final_message=True, chat_template_kwargs={"deep": {"x": 1}}),
    ).prompt
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "eve"},
        {"role": "assistant", "content": "so"},
    ]
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    assert prompt.template_kwargs == {"deep": {"x": 1}}
    assert plan("/v1/chat/completions", chat_body()).prompt.add_generation_prompt is True


def test_special_tokens(plan: Any) -> None:
    assert plan("/v1/completions", {"prompt": "a"}).prompt.add_special_tokens is True
    assert plan("/v1/completions", {"prompt": "a", "add_special_tokens": False}).prompt.add_special_tokens is False


@pytest.mark.parametrize("prompt", [[1] * 5000, [[1], [1] * 5000]])
def test_ids_that_cannot_fit_are_refused_by_their_number(
    frontend: RunningFrontend, http: httpx.Client, prompt: list[Any]
) -> None:
    """They never reach the tokenizer process."""
    before = len(frontend.fake.of_kind(GenerateRequest))
    answer = http.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "This model's maximum context length is" in error["message"]
    assert "5000 prompt tokens" in error["message"]
    assert len(frontend.fake.of_kind(GenerateRequest)) == before
