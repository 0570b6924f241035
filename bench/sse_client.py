"""A small streaming HTTP client: one connection, one request, the arrival time of every chunk that carries text.

Plain asyncio streams, so that the client takes little of the cores that the server needs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stream:
    """One request's life on the client's clock (``time.perf_counter()`` seconds)."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """One for each chunk with a choice's text."""
    ended: float = 0.0
    usage: Mapping[str, int] | None = None


class RequestFailed(Exception):
    """The server answered with an error."""


async def stream_completion(host: str, port: int, body: Mapping[str, Any]) -> Stream:
    """POST /v1/completions with ``stream`` and read to the end.

    Raises:
        RequestFailed: any status but 200, an error frame, or a stream cut off before [DONE].
    """
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    result = Stream(sent=time.perf_counter())
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload
        )
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            raise RequestFailed((await reader.read()).decode(errors="replace"))
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            arrived = time.perf_counter()
            if line.startswith(b"data: [DONE]"):
                result.ended = arrived
                return result
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RequestFailed(str(chunk["error"]))
            if any(choice["text"] for choice in chunk["choices"]):
                result.arrivals.append(arrived)
            result.usage = chunk.get("usage") or result.usage
        raise RequestFailed("the stream ended before [DONE]")
    finally:
        writer.close()
        await writer.wait_closed()
