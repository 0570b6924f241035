"""A recorded stream of an OpenAI-compatible server, read after its end: chunks, their times, usage, errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ringserve.bench.records import Failure, Usage


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def output(self) -> str | None:
        """What the chunk adds: text, or "" for output that is no text; None if nothing."""
        if self.text:
            return self.text
        delta = self.delta
        if delta is None:
            return None
        if delta.content:
            return delta.content
        return "" if delta.reasoning_content or delta.reasoning or delta.tool_calls else None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None
    object: str = ""
    message: str = ""


@dataclass
class StreamContent:
    """What a stream said."""

    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] | None = None
    texts: list[str] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    last_time: float | None = None
    """Arrival of the last frame."""
    ended: bool = False
    """A finish reason or [DONE] was seen."""


def read_stream(reads: Sequence[tuple[float, bytes]]) -> StreamContent:
    """Parse the reads of one body. A frame's time is that of the read that completed it.

    A failure (malformed frame, error frame) ends the parse; what came before it is kept.
    """
    content = StreamContent()
    totals: list[int] = []
    for time, data in _frames(reads):
        content.last_time = time
        if data == b"[DONE]":
            content.ended = True
            break
        try:
            chunk = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            content.failure = Failure("malformed", f"{error}: {_shown(data)}")
            break
        if chunk.error is not None or chunk.object == "error":
            content.failure = Failure("server_error", error_message(chunk.error or chunk.message))
            break
        content.usage = chunk.usage or content.usage
        for choice in chunk.choices[:1]:
            if (output := choice.output()) is not None:
                content.chunk_times.append(time)
                content.texts.append(output)
                if chunk.usage:
                    totals.append(chunk.usage.completion_tokens)
            if choice.finish_reason:
                content.finish_reason, content.ended = choice.finish_reason, True
    if totals and len(totals) == len(content.chunk_times):
        content.chunk_tokens = [later - earlier for earlier, later in zip([0, *totals], totals, strict=False)]
    return content


def _frames(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(arrival, data) of each SSE event with data; comments and other fields are skipped."""
    rest = b""
    pending: list[bytes] = []
    for time, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                pending.append(line[5:].removeprefix(b" "))
            elif not line and pending:
                yield time, b"\n".join(pending)
                pending = []
            elif line and line[:1] != b":" and line.split(b":")[0] not in _FIELDS:
                yield time, line  # neither a field nor a comment: the decoder will say what is wrong with it
    if rest or pending:
        leftover = b"\n".join([*pending, rest]).strip()
        if leftover == b"data: [DONE]":
            yield reads[-1][0], b"[DONE]"
        elif leftover:
            yield reads[-1][0], leftover.removeprefix(b"data:").strip()


def error_message(error: Any) -> str:
    """The message in an error object, whatever its form."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("error") or error
        if isinstance(error, dict):
            error = error.get("message", error)
    return str(error)[:300]


def http_failure(status: int, body: bytes) -> Failure:
    """From an answer that is not 200."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Failure(f"http_{status}", _shown(body) or f"status {status} without a body")
    return Failure(f"http_{status}", error_message(parsed.get("error", parsed) if isinstance(parsed, dict) else parsed))


def _shown(data: bytes) -> str:
    text = data[:200].decode(errors="replace")
    return text + ("..." if len(data) > 200 else "")


_DECODER = msgspec.json.Decoder(_Chunk)
_FIELDS = (b"event", b"id", b"retry")
