"""A recorded stream of an OpenAI-compatible server, read after its end: chunks, their times, usage, errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ringserve.bench.records import Failure, Usage

Count = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
"""Tokens. A server that says more than fits into any context is not to be believed."""


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


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None

    def failed(self) -> bool:
        """An error, in one of the forms in use."""
        return self.error is not None or self.object == "error" or bool(self.message and not self.choices)


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

    A failure (malformed frame, error frame) ends the parse; what came before it is kept. A usage that counts no token
    is none. Tokens without any text came with the finish reason.
    """
    content = StreamContent()
    totals: list[int] = []
    finish_time = 0.0
    for time, data in _frames(reads):
        content.last_time = time
        if data == b"[DONE]":
            content.ended = True
            break
        try:
            chunk = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            content.failure = Failure("malformed", f"{error}: {_shown(data)}")
            break
        if chunk.failed():
            content.failure = Failure("server_error", error_message(chunk.error or chunk.message))
            break
        total = chunk.usage.completion_tokens if chunk.usage else None
        if chunk.usage and total:
            content.usage = Usage(chunk.usage.prompt_tokens, total)
        for choice in (chunk.choices or [])[:1]:
            if (output := choice.output()) is not None:
                content.chunk_times.append(time)
                content.texts.append(output)
                if total:
                    totals.append(total)
            if choice.finish_reason:
                content.finish_reason, content.ended, finish_time = choice.finish_reason, True, time
    if content.usage and content.finish_reason and not content.chunk_times:
        content.chunk_times.append(finish_time)
    if totals and len(totals) == len(content.chunk_times):
        content.chunk_tokens = [later - earlier for earlier, later in zip([0, *totals], totals, strict=False)]
    return content


def _frames(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(arrival, data) of each SSE event with data; comments and other fields are skipped."""
    begun: list[bytes] = []  # pieces of a line; joined once, however many there are
    pending: list[bytes] = []
    for time, data in reads:
        begun.append(data)
        if b"\n" not in data:
            continue
        *lines, rest = b"".join(begun).split(b"\n")
        begun = [rest]
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                pending.append(line[5:].removeprefix(b" "))
            elif not line and pending:
                yield time, b"\n".join(pending)
                pending = []
            elif line and line[:1] != b":" and line.split(b":")[0] not in _FIELDS:
                yield time, line  # neither a field nor a comment: the decoder will say what is wrong with it
    if begun or pending:
        leftover = b"\n".join([*pending, b"".join(begun)]).strip()
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
    return _printable(str(error or "an error without a message")[:300])


def http_failure(status: int, body: bytes, location: bytes = b"") -> Failure:
    """From an answer that is not 200; ``location``: where it redirects to, which is not followed."""
    if location:
        return Failure(f"http_{status}", f"redirected to {_shown(location)}")
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Failure(f"http_{status}", _shown(body) or f"status {status} without a body")
    return Failure(f"http_{status}", error_message(parsed.get("error", parsed) if isinstance(parsed, dict) else parsed))


def _shown(data: bytes) -> str:
    text = _printable(data[:200].decode(errors="replace"))
    return text + ("..." if len(data) > 200 else "")


def _printable(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


_DECODER = msgspec.json.Decoder(_Chunk)
_FIELDS = (b"event", b"id", b"retry")
