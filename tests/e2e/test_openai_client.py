"""The official client against the real server, and the raw bytes of a stream."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from server_process import Server

MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_streamed_text_is_the_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text.strip()
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}


def test_n_choices_with_temperature_zero_are_equal(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 1


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for entry in logprobs.content:
        assert entry.token == entry.top_logprobs[0].token  # greedy: the most likely one
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode() == entry.token
    text = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode()
    assert text == answer.choices[0].message.content


def test_echo_with_logprobs_scores_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a b c", echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "a b c"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None and value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_stop_string_is_found_and_not_shown(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0)
    text = free.choices[0].message.content or ""
    stop = text[8:14]
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0, stop=stop)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[])
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["param"] == "messages"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
        client.completions.create(model=MODEL, prompt="word " * 5000)


def test_max_tokens_beyond_what_fits_is_clamped(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="word " * 4085, max_tokens=1000, temperature=0
    )
    answer = raw.parse()
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 4096
    assert "x-ringserve-notice" in raw.headers


def test_async_cancel(server: Server) -> None:
    async def scenario() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x")
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=3000, stream=True)
        async for _ in stream:
            await stream.close()
            break
        await client.close()

    asyncio.run(scenario())


def test_multi_byte_text_streams_whole_characters(server: Server) -> None:
    """Echoed ids of every script come back as the very text, and every frame is valid JSON in valid UTF-8."""
    text = "naïve café 👩‍👩‍👧‍👦 中文测试 é́ 🇫🇷 שלום"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"] == text
    body = {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": 24,
        "echo": True,
        "stream": True,
        "temperature": 1.5,
        "seed": 3,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        raw = b"".join(response.iter_raw())
    frames = raw.decode("utf-8").split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    streamed = "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames[:-2])
    assert streamed.startswith(text)
    whole = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False}, timeout=60).json()
    assert whole["choices"][0]["text"] == streamed
