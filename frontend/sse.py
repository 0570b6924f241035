"""Server-sent events as OpenAI's clients read them: ``data: <json>\\n\\n``, comments, and a last ``data: [DONE]``."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def frame(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class ChunkFrames:
    """Frames of one stream: what is the same in all of them is encoded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":'

    def frame(self, choices: list[dict[str, Any]], rest: dict[str, Any]) -> bytes:
        """A chunk; ``rest`` holds top-level fields after ``choices`` (usage, notice)."""
        body = self._head + msgspec.json.encode(choices)
        if rest:
            body += b"," + msgspec.json.encode(rest)[1:-1]
        return body + b"}\n\n"
