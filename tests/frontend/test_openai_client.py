"""The official openai client, sync and async, as people use it."""

from __future__ import annotations

import asyncio

import openai
import pytest
from fake_tokenizer_process import WORDS
from frontend_harness import MODEL, RunningFrontend

from ringserve.messages.requests import Abort, GenerateRequest

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(frontend: RunningFrontend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="x", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("nope/nested")
    assert error.value.code == "model_not_found"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=5)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert choice.message.content == "".join(WORDS[:5])
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (1, 5, 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_stream_with_usage_and_logprobs(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
    )
    chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "".join(WORDS[:6])
    with_logprobs = [chunk.choices[0].logprobs for chunk in chunks[:-1] if chunk.choices[0].logprobs]
    assert len(with_logprobs) == 6
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 7 + ["length"]


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HI, max_tokens=6) as stream:
        events = [event.type for event in stream]
        snapshot = stream.current_completion_snapshot
    assert "content.delta" in events
    assert snapshot.choices[0].message.content == "".join(WORDS[:6])


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=5, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == list(WORDS[:5])
    assert [bytes(entry.bytes or ()).decode() for entry in logprobs.content] == list(WORDS[:5])
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 5


def test_echo_with_logprobs_and_no_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a b c", echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "a b c"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", " b", " c"]
    assert choice.logprobs.token_logprobs == [None, -0.25, -0.25]
    assert choice.logprobs.text_offset == [0, 1, 3]


def test_echo_with_logprobs_for_every_choice(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a b", n=2, echo=True, logprobs=1, max_tokens=1)
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", " b", WORDS[0]]


def test_n(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=3, max_tokens=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 6)


def test_several_prompts_times_n(client: openai.OpenAI, frontend: RunningFrontend) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b c"], n=2, max_tokens=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text.split(" alpha")[0] for choice in answer.choices] == ["a", "a", "b c", "b c"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
    assert [request.n for request in frontend.fake.of_kind(GenerateRequest)[-2:]] == [2, 2]


def test_token_id_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[[5, 6], [7]], max_tokens=1, extra_body={"return_token_ids": True}
    )
    bodies = [choice.model_dump() for choice in answer.choices]
    assert [body["prompt_token_ids"] for body in bodies] == [[5, 6], [7]]
    assert [body["token_ids"] for body in bodies] == [[100], [100]]
    assert client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=1).choices[0].text == WORDS[0]


def test_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=[])
    assert isinstance(error.value.body, dict)
    assert error.value.body["param"] == "messages"
    assert error.value.type == "invalid_request_error"


def test_async_cancel(frontend: RunningFrontend) -> None:
    async def cancel() -> None:
        async with openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="x") as client:
            stream = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=5000, stream=True)
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 5:
                    await stream.close()
                    break

    aborts = len(frontend.fake.of_kind(Abort))
    frontend.fake.hold = False
    asyncio.run(cancel())
    frontend.wait_until(lambda: frontend.actor.dispatcher.statistics()["journal_entries"] == 0)
    assert len(frontend.fake.of_kind(Abort)) <= aborts + 1
