"""Streams as they come over the wire, cut anywhere."""

from __future__ import annotations

import json
import time

import pytest

from ringserve.bench.records import Usage
from ringserve.bench.stream import http_failure, read_stream


def frame(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    return frame(choices=[{"index": 0, "text": piece, "finish_reason": finish_reason}])


STREAM = (
    b": keep-alive\n\n"
    + frame(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    + frame(choices=[{"index": 0, "delta": {"content": "H\u00e9"}, "finish_reason": None}], usage=None)
    + b'event: message\nid: 7\ndata: {"choices": [{"delta": {"content": "llo"}}]}\r\n\r\n'
    + frame(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    + frame(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_any_cut_gives_the_same(size: int) -> None:
    """A frame's time is that of the read that completes it."""
    reads = [(float(start + size), STREAM[start : start + size]) for start in range(0, len(STREAM), size)]
    content = read_stream(reads)
    assert content.texts == ["H\u00e9", "llo"]
    assert content.usage == Usage(3, 2)
    assert content.finish_reason == "stop"
    assert content.failure is None
    assert content.ended
    for piece, at in zip(("H\\u00e9", "llo"), content.chunk_times, strict=True):
        end = STREAM.index(b"\n", STREAM.index(piece.encode()))
        assert end < at <= end + 4 + size
    assert content.last_time is not None
    assert content.last_time >= len(STREAM)


def test_output_that_is_no_text() -> None:
    calls = [{"index": 0, "function": {"arguments": "{"}}]
    content = read_stream(
        [
            (1.0, frame(choices=[{"delta": {"reasoning_content": "hm"}}])),
            (2.0, frame(choices=[{"delta": {"tool_calls": calls}}])),
            (3.0, frame(choices=[{"delta": {"tool_calls": None, "content": None}}])),
        ]
    )
    assert content.chunk_times == [1.0, 2.0]


def test_counts_in_each_chunk() -> None:
    def counted(total: int) -> bytes:
        usage = {"prompt_tokens": 1, "completion_tokens": total}
        return frame(choices=[{"text": "x"}], usage=usage)

    assert read_stream([(1.0, counted(1)), (2.0, counted(4)), (3.0, counted(5))]).chunk_tokens == [1, 3, 1]
    assert read_stream([(1.0, counted(1)), (2.0, text("x"))]).chunk_tokens is None
    assert read_stream([(1.0, text("x"))]).chunk_tokens is None


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"data: {\n\n", "malformed"),
        (b'data: {"choices": 3}\n\n', "malformed"),
        (b"data: \xff\xfe\n\n", "malformed"),
        (b"<html>\n<body>", "malformed"),
        (b"just text", "malformed"),
        (frame(error={"message": "died"}), "server_error"),
        (frame(object="error", message="died"), "server_error"),
        (frame(error="died"), "server_error"),
        (b"event: error\n" + frame(message="died"), "server_error"),
        (b'data: {"error": ' + b"[" * 100_000 + b"\n\n", "malformed"),
        (frame(choices=[], usage={"completion_tokens": -1}), "malformed"),
        (frame(choices=[], usage={"completion_tokens": 10**9}), "malformed"),
    ],
)
def test_failures_keep_what_came_before(data: bytes, kind: str) -> None:
    content = read_stream([(1.0, text("x")), (2.0, data)])
    assert content.failure is not None
    assert content.failure.kind == kind
    assert kind == "malformed" or content.failure.message == "died"
    assert content.chunk_times == [1.0]


@pytest.mark.parametrize("usage", [{}, {"completion_tokens": None}, {"prompt_tokens": 3, "completion_tokens": 0}])
def test_a_usage_without_tokens_is_none(usage: dict[str, int | None]) -> None:
    content = read_stream([(1.0, text("x")), (2.0, frame(choices=None, object=None, message=None, usage=usage))])
    assert content.failure is None
    assert content.usage is None


def test_tokens_without_text_came_with_the_finish_reason() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    content = read_stream([(1.0, text("")), (2.0, text("", "stop")), (3.0, frame(choices=[], usage=usage))])
    assert content.chunk_times == [2.0]
    assert read_stream([(1.0, text("", "stop"))]).chunk_times == []


def test_a_frame_in_many_pieces_is_joined_once() -> None:
    data = text("x" * 3_000_000) + b"data: [DONE]\n\n"
    reads = [(float(start), data[start : start + 100]) for start in range(0, len(data), 100)]
    began = time.process_time()
    content = read_stream(reads)
    assert time.process_time() - began < 5  # took minutes when every piece was joined to all before it
    assert [len(piece) for piece in content.texts] == [3_000_000]
    assert content.ended


def test_messages_do_not_drive_the_terminal() -> None:
    assert http_failure(503, b'{"error": "\\u001b[31mfull\\u0007"}').message == " [31mfull "
    assert http_failure(503, b"\x1b]0;full\x07").message == " ]0;full "


def test_an_end_without_a_last_newline() -> None:
    assert read_stream([(1.0, text("x")), (2.0, b"data: [DONE]")]).ended
    assert not read_stream([(1.0, text("x"))]).ended


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "full"}}', "full"),
        (b'{"error": "full", "error_type": "overloaded"}', "full"),
        (b'{"object": "error", "message": "full"}', "full"),
        (b'{"detail": "full"}', "{'detail': 'full'}"),
        (b'["full"]', "['full']"),
        (b"<h1>full</h1>", "<h1>full</h1>"),
        (b"", "status 503 without a body"),
    ],
)
def test_error_bodies(body: bytes, message: str) -> None:
    failure = http_failure(503, body)
    assert (failure.kind, failure.message) == ("http_503", message)
