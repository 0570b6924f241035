"""Streams on the wire: framing byte by byte, errors after the start, keep-alives, clients that leave or do not read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_tokenizer_process import WORDS
from frontend_harness import MODEL, RawClient, RunningFrontend, chat_body

from ringserve.frontend.generation import StreamSettings
from ringserve.messages.requests import Abort, GenerateRequest, RequestRefused

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture
def held(frontend: RunningFrontend) -> Iterator[RunningFrontend]:
    """A frontend whose engine makes a step only when the test says so."""
    frontend.fake.hold = True
    frontend.fake.received.clear()
    yield frontend
    frontend.fake.hold = False
    frontend.fake.auto_final = True
    frontend.call(frontend.fake.finish_aborted)
    frontend.wait_until(lambda: not any(frontend.actor.dispatcher.statistics().values()))


def events(text: str) -> list[Any]:
    """The frames' bodies; the last must be [DONE]."""
    frames = text.split("\n\n")
    assert frames[-1] == ""
    assert frames[-2] == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-2])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def test_chat_framing(http: httpx.Client) -> None:
    answer = http.post(
        CHAT, json=chat_body(max_tokens=2, stream=True, stream_options={"include_usage": True}, request_id="r1")
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "r1"
    created = events(answer.text)[0]["created"]
    head = f'{{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":{created},"model":"{MODEL}","choices":['

    def choice(delta: str, finish: str) -> str:
        return f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}'

    usage = '{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}'
    expected = [
        choice('{"role":"assistant","content":""}', "null") + '],"usage":null}',
        choice('{"content":" alpha"}', "null") + '],"usage":null}',
        choice('{"content":" beta"}', "null") + '],"usage":null}',
        choice("{}", '"length","stop_reason":null') + '],"usage":null}',
        f'],"usage":{usage}}}',
    ]
    text = "".join(f"data: {head}{rest}\n\n" for rest in expected) + "data: [DONE]\n\n"
    assert answer.content.decode() == text


def test_completion_framing(http: httpx.Client) -> None:
    answer = http.post(TEXT, json={"prompt": "a b", "echo": True, "logprobs": 0, "max_tokens": 1, "stream": True})
    chunks = events(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all("usage" not in chunk for chunk in chunks)
    (choice,) = chunks[0]["choices"]
    assert choice["text"] == "a b alpha"
    assert choice["logprobs"] == {
        "tokens": ["a", " b", " alpha"],
        "token_logprobs": [None, -0.25, -0.25],
        "top_logprobs": [None, {" b": -0.25}, {" alpha": -0.25}],
        "text_offset": [0, 1, 3],
    }
    assert choice["finish_reason"] == "length"


def test_each_choice_of_a_stream_begins_and_ends_once(http: httpx.Client) -> None:
    answer = http.post(TEXT, json={"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "stream": True})
    chunks = [chunk["choices"][0] for chunk in events(answer.text)]
    for index in range(4):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == "".join(WORDS[:4])
        assert [chunk["finish_reason"] for chunk in mine] == [None] * 3 + ["length"]
    chat = [chunk["choices"][0] for chunk in events(http.post(CHAT, json=chat_body(n=2, stream=True)).text)]
    assert [chunk["index"] for chunk in chat if chunk["delta"].get("role")] == [0, 1]


def test_continuous_usage(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http.post(CHAT, json=chat_body(stream=True, stream_options=options)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_pieces_come_as_they_are_made(held: RunningFrontend) -> None:
    client = RawClient(held)
    client.post(CHAT, chat_body(stream=True, max_tokens=9))
    held.wait_until(lambda: bool(held.fake.running))
    for word in WORDS[:3]:
        held.call(held.fake.step)
        client.read_until(b'"content":' + json.dumps(word, ensure_ascii=False).encode() + b"}")
    client.close()


def test_refusal_before_the_first_output_is_a_status(held: RunningFrontend) -> None:
    client = RawClient(held)
    client.post(CHAT, chat_body(stream=True))
    held.wait_until(lambda: bool(held.fake.running))
    request = held.fake.of_kind(GenerateRequest)[0]
    held.fake.running.clear()
    refused = RequestRefused(request.request_id, 503, "no room", "server_error", None, "overloaded", 2.5)
    held.call(lambda: held.deliver([refused]))
    data = client.read_until(b"}}")
    assert data.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 3\r\n" in data
    assert held.fake.of_kind(Abort) == []
    client.close()


def test_error_after_the_start_is_a_frame_and_done(http: httpx.Client, frontend: RunningFrontend) -> None:
    frontend.fake.fail_after = 2
    try:
        frames = events(http.post(CHAT, json=chat_body(stream=True, max_tokens=5)).text)
        assert frames[-1]["error"]["message"] == "the model gave no finite logit"
        assert frames[-1]["error"]["type"] == "server_error"
        frontend.fake.fail_after = 1
        answer = http.post(CHAT, json=chat_body(stream=True, max_tokens=5))
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
        assert http.post(CHAT, json=chat_body()).status_code == 500
    finally:
        frontend.fake.fail_after = None


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_causes_one_abort(held: RunningFrontend, stream: bool) -> None:
    held.fake.auto_final = False
    client = RawClient(held)
    client.post(TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 50, "stream": stream})
    held.wait_until(lambda: len(held.fake.running) == 4)
    held.call(held.fake.step)
    if stream:
        client.read_until(b" alpha")
    client.close()
    held.wait_until(lambda: len(held.fake.of_kind(Abort)) >= 2)
    assert held.statistics()["choices_in_flight"] == 4  # the entries stay until the final messages
    held.call(held.fake.finish_aborted)
    held.wait_until(lambda: held.actor.dispatcher.statistics()["journal_entries"] == 0)
    requests = [request.request_id for request in held.fake.of_kind(GenerateRequest)]
    assert sorted(abort.request_id for abort in held.fake.of_kind(Abort)) == sorted(requests)
    assert {abort.choice for abort in held.fake.of_kind(Abort)} == {-1}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_client_that_leaves_is_seen_behind_pipelined_requests(
    held: RunningFrontend, stream: bool, ahead: int
) -> None:
    client = RawClient(held)
    for _ in range(1 + ahead):
        client.post(TEXT, {"prompt": "a", "max_tokens": 50, "stream": stream})
    held.wait_until(lambda: len(held.fake.running) == 1)
    client.close()
    held.wait_until(lambda: held.actor.dispatcher.statistics()["journal_entries"] == 0)
    held.wait_until(lambda: held.actor._app.active == 0)
    assert len(held.fake.of_kind(GenerateRequest)) == 1  # the others are not begun for nobody
    assert len(held.fake.of_kind(Abort)) == 1


def test_a_finished_request_is_not_aborted(held: RunningFrontend) -> None:
    client = RawClient(held)
    client.post(TEXT, {"prompt": "a", "max_tokens": 1})
    held.wait_until(lambda: bool(held.fake.running))
    held.call(held.fake.step)
    client.read_until(b'"usage"')
    client.close()
    held.wait_until(lambda: held.actor._app.active == 0)
    assert held.fake.of_kind(Abort) == []


@pytest.mark.parametrize("version", ["1.0", "0.9"])
@pytest.mark.parametrize("headers", ["", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_old_client_gets_no_chunks(frontend: RunningFrontend, path: str, headers: str, version: str) -> None:
    """HTTP/1.0 knows no transfer encoding: the end of the connection is the end of the stream."""
    body = chat_body(stream=True) if path == CHAT else {"prompt": "a", "max_tokens": 3, "stream": True}
    client = RawClient(frontend)
    client.post(path, body, headers, version)
    head, _, rest = client.read_all().partition(b"\r\n\r\n")
    client.close()
    assert b" 200 " in head.splitlines()[0]
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    chunks = events(rest.decode())
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("length") == 1


def test_an_old_client_gets_pieces_as_they_are_made(held: RunningFrontend) -> None:
    client = RawClient(held)
    client.post(TEXT, {"prompt": "a", "max_tokens": 2, "stream": True}, version="1.0")
    held.wait_until(lambda: len(held.fake.running) == 1)
    held.call(held.fake.step)
    client.read_until(b'"text":')
    held.call(held.fake.step)
    assert client.read_all().endswith(b"data: [DONE]\n\n")
    client.close()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/nowhere"])
def test_an_old_client_gets_whole_answers(frontend: RunningFrontend, path: str, method: str) -> None:
    client = RawClient(frontend)
    client.socket.sendall(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
    head, _, body = client.read_all().partition(b"\r\n\r\n")
    client.close()
    (length,) = [int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length:")]
    assert len(body) == (length if method == "GET" else 0)
    assert b"transfer-encoding" not in head.lower()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [True, False])
def test_an_old_client_is_not_asked_to_continue(frontend: RunningFrontend, path: str, stream: bool) -> None:
    """HTTP/1.0 knows no interim answers: one would be taken for the answer itself. HTTP/1.1 gets it."""
    body = chat_body(stream=stream) if path == CHAT else {"prompt": "a", "max_tokens": 3, "stream": stream}
    statuses = []
    for version in ("1.0", "1.1"):
        client = RawClient(frontend)
        client.post(path, body, "Expect: 100-continue\r\nConnection: close\r\n", version)
        statuses.append(client.read_all().split(b" ", 2)[1])
        client.close()
    assert statuses == [b"200", b"100"]


def test_keep_alive_comments_once_the_stream_has_started() -> None:
    with RunningFrontend(streams=StreamSettings(keep_alive_interval=0.05)) as frontend:
        frontend.fake.hold = True
        client = RawClient(frontend)
        client.post(CHAT, chat_body(stream=True, max_tokens=2))
        frontend.wait_until(lambda: bool(frontend.fake.running))
        frontend.call(frontend.fake.step)
        data = client.read_until(b": keep-alive\n\n\r\n")
        client.read_until(b": keep-alive\n\n\r\n")
        assert data.index(b" alpha") < data.index(b": keep-alive")
        frontend.call(frontend.fake.step)
        client.read_until(b"data: [DONE]\n\n")
        client.close()


def test_a_client_that_does_not_read_is_cut_off_and_slows_nobody() -> None:
    """The socket's buffers fill, then the stream's own bound is passed; a neighbour streams on meanwhile."""
    with RunningFrontend(streams=StreamSettings(max_buffered_bytes=300_000)) as frontend:
        fake = frontend.fake
        fake.hold, fake.step_text = True, "x" * 60_000
        slow, quick = RawClient(frontend, receive_buffer=4096), RawClient(frontend)
        slow.post(TEXT, {"prompt": "slow", "max_tokens": 500, "stream": True})
        frontend.wait_until(lambda: len(fake.running) == 1)
        quick.post(TEXT, {"prompt": "quick", "max_tokens": 500, "stream": True})
        frontend.wait_until(lambda: len(fake.running) == 2)
        steps = 0
        while not fake.of_kind(Abort):
            frontend.call(fake.step)
            quick.read_until(b"x" * 60_000)
            steps += 1
            assert steps < 400
        (abort,) = fake.of_kind(Abort)
        requests = fake.of_kind(GenerateRequest)
        assert abort.request_id == requests[0].request_id
        assert requests[0].prompt.text == "slow"
        frontend.wait_until(lambda: frontend.actor._app.active == 1)
        fake.step_text = " end"
        frontend.call(fake.step)
        quick.read_until(b" end")
        assert frontend.statistics()["journal_entries"] == 1
        quick.close()
        slow.close()
        frontend.wait_until(lambda: not any(frontend.actor.dispatcher.statistics().values()))


def test_a_socket_that_takes_nothing_is_cut_off() -> None:
    with RunningFrontend(streams=StreamSettings(stall_timeout=0.1, max_buffered_bytes=1 << 30)) as frontend:
        fake = frontend.fake
        fake.hold, fake.step_text = True, "x" * 200_000
        client = RawClient(frontend, receive_buffer=4096)
        client.post(TEXT, {"prompt": "slow", "max_tokens": 500, "stream": True})
        frontend.wait_until(lambda: len(fake.running) == 1)
        for _ in range(60):
            frontend.call(fake.step)
        frontend.wait_until(lambda: bool(fake.of_kind(Abort)))
        frontend.wait_until(lambda: frontend.actor._app.active == 0)
        assert len(fake.of_kind(Abort)) == 1
        client.close()


def test_no_task_or_connection_is_left(frontend: RunningFrontend, http: httpx.Client) -> None:
    http.post(CHAT, json=chat_body(stream=True))
    before = http.get("/debug/integrity").json()["frontend"]
    for _ in range(5):
        http.post(CHAT, json=chat_body(stream=True))
        http.post(CHAT, json=chat_body())
        http.post("/tokenize", json={"prompt": "a"})
    assert http.get("/debug/integrity").json()["frontend"] == before
    assert before["journal_entries"] == 0
