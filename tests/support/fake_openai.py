"""A tiny OpenAI-compatible server in a thread of the test, which can also go wrong in every way a server can."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

Body = dict[str, Any]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Call:
    """One request on its way to an answer."""

    path: str
    headers: dict[str, str]
    body: Body
    writer: asyncio.StreamWriter
    number_on_connection: int

    def send(self, data: bytes) -> None:
        """An HTTP chunk."""
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def frame(self, content: Body | str) -> None:
        """An SSE frame in an HTTP chunk of its own."""
        text = content if isinstance(content, str) else json.dumps(content)
        self.send(f"data: {text}\n\n".encode())

    def end(self) -> None:
        """End of the HTTP message."""
        self.writer.write(b"0\r\n\r\n")

    def plain(self, status: str, body: bytes, headers: str = "") -> None:
        """A whole answer with a length."""
        self.writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)

    def text(self, piece: str | None, finish_reason: str | None = None, usage: Body | None = None) -> Body:
        """A chunk of whichever API was asked."""
        if self.path.endswith("/chat/completions"):
            choice: Body = {"index": 0, "delta": {"content": piece} if piece else {}, "finish_reason": finish_reason}
        else:
            choice = {"index": 0, "text": piece or "", "finish_reason": finish_reason}
        return {"choices": [choice], "usage": usage}

    def usage(self, output: int) -> Body:
        """The counts for an answer of so many tokens."""
        prompt = self.body.get("prompt", "")
        length = len(prompt) if isinstance(prompt, list) else 7
        return {"prompt_tokens": length, "completion_tokens": output, "total_tokens": length + output}

    async def pause(self) -> None:
        """Let what was written go out as a packet of its own."""
        await self.writer.drain()
        await asyncio.sleep(0.002)


async def good(call: Call) -> bool:
    """One chunk for each token, finish reason, usage, [DONE]."""
    call.writer.write(HEAD)
    tokens = call.body["max_tokens"]
    for _ in range(tokens):
        call.frame(call.text(" tok"))
        await call.pause()
    call.frame(call.text(None, "length"))
    if call.body.get("stream_options", {}).get("include_usage"):
        call.frame({"choices": [], "usage": call.usage(tokens)})
    call.frame("[DONE]")
    call.end()
    return True


async def pairs(call: Call) -> bool:
    """Two tokens in a chunk, counted only at the end."""
    call.writer.write(HEAD)
    for _ in range(call.body["max_tokens"] // 2):
        call.frame(call.text(" tok tok"))
        await call.pause()
    call.frame(call.text(None, "length"))
    call.frame({"choices": [], "usage": call.usage(call.body["max_tokens"])})
    call.frame("[DONE]")
    call.end()
    return True


async def counted_pairs(call: Call) -> bool:
    """Two tokens in a chunk, each chunk with the count so far."""
    call.writer.write(HEAD)
    for index in range(call.body["max_tokens"] // 2):
        call.frame(call.text(" tok tok", None, call.usage(2 * index + 2)))
        await call.pause()
    call.frame(call.text(None, "length", call.usage(call.body["max_tokens"])))
    call.frame("[DONE]")
    call.end()
    return True


async def without_done(call: Call) -> bool:
    """A finish reason is all that tells the end."""
    call.writer.write(HEAD)
    call.frame(call.text(" tok"))
    call.frame(call.text(None, "stop"))
    call.end()
    return True


async def until_close(call: Call) -> bool:
    """A body whose length only its connection's end tells."""
    call.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    call.writer.write(f"data: {json.dumps(call.text(' tok'))}\n\ndata: [DONE]\n\n".encode())
    await call.pause()
    return False


async def once_per_connection(call: Call) -> bool:
    """Closes a kept connection when it is used again."""
    return await good(call) if call.number_on_connection == 0 else False


async def overloaded(call: Call) -> bool:
    """503 with an OpenAI error."""
    error = {"error": {"message": "The queue is full.", "type": "overloaded", "param": None, "code": None}}
    call.plain("503 Service Unavailable", json.dumps(error).encode(), "Retry-After: 1\r\n")
    return True


async def bad_request(call: Call) -> bool:
    """400 with the old flat error object."""
    call.plain("400 Bad Request", b'{"object":"error","message":"no such field","type":"BadRequestError","code":400}')
    return True


async def broken(call: Call) -> bool:
    """500 with a body that is not JSON."""
    call.plain("500 Internal Server Error", b"<h1>Internal Server Error</h1>")
    return True


async def hang(call: Call) -> bool:
    """Takes the request and says nothing."""
    await asyncio.sleep(3600)
    return False


async def hang_midway(call: Call) -> bool:
    """Two tokens, then nothing."""
    call.writer.write(HEAD)
    call.frame(call.text(" tok"))
    call.frame(call.text(" tok"))
    await asyncio.sleep(3600)
    return False


async def reset(call: Call) -> bool:
    """RST instead of an answer."""
    linger = struct.pack("ii", 1, 0)
    call.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    call.writer.transport.abort()
    return False


async def close(call: Call) -> bool:
    """FIN instead of an answer."""
    return False


async def cut(call: Call) -> bool:
    """The connection ends in the middle of the stream."""
    call.writer.write(HEAD)
    call.frame(call.text(" tok"))
    await call.pause()
    return False


async def cut_quietly(call: Call) -> bool:
    """A proper HTTP end, but neither finish reason nor [DONE]."""
    call.writer.write(HEAD)
    call.frame(call.text(" tok"))
    call.end()
    return True


async def malformed(call: Call) -> bool:
    """A frame that is not JSON."""
    call.writer.write(HEAD)
    call.frame(call.text(" tok"))
    call.frame('{"choices": [')
    call.frame("[DONE]")
    call.end()
    return True


async def wrong_types(call: Call) -> bool:
    """JSON, but not a chunk."""
    call.writer.write(HEAD)
    call.frame('{"choices": "none"}')
    call.end()
    return True


async def html(call: Call) -> bool:
    """200 with a page: not an API at all."""
    call.plain("200 OK", b"<html><body>It works!</body></html>", "Content-Type: text/html\r\n")
    return True


async def error_frame(call: Call) -> bool:
    """An error after the first token."""
    call.writer.write(HEAD)
    call.frame(call.text(" tok"))
    call.frame({"error": {"message": "The executor died.", "type": "server_error", "param": None, "code": None}})
    call.frame("[DONE]")
    call.end()
    return True


async def empty(call: Call) -> bool:
    """A proper end without a token."""
    call.writer.write(HEAD)
    call.frame(call.text(None, "stop"))
    call.frame("[DONE]")
    call.end()
    return True


async def upgrade(call: Call) -> bool:
    """Wants to speak something else."""
    call.writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: other\r\nConnection: upgrade\r\n\r\nhello")
    await call.pause()
    return False


async def redirect(call: Call) -> bool:
    """The API lives elsewhere."""
    call.plain("307 Temporary Redirect", b"", "Location: https://elsewhere/v1\r\n")
    return True


NESTED = b"[" * 100_000


async def nested(call: Call) -> bool:
    """JSON without a bottom."""
    call.writer.write(HEAD)
    call.frame(call.text(" tok"))
    call.send(b'data: {"error": ' + NESTED + b"\n\n")
    call.end()
    return True


async def nested_refusal(call: Call) -> bool:
    """The same as an answer that is not 200."""
    call.plain("503 Service Unavailable", NESTED)
    return True


async def impossible_counts(call: Call) -> bool:
    """More tokens than any context holds."""
    call.writer.write(HEAD)
    call.frame(call.text(" tok", None, call.usage(1)))
    call.frame(call.text(" tok", "length", call.usage(10**12)))
    call.end()
    return True


async def no_http(call: Call) -> bool:
    """Something else listens there."""
    call.writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
    await call.pause()
    return False


Behaviour = Callable[[Call], Awaitable[bool]]
"""Answers a call; returns whether the connection stays open."""


class FakeOpenAI:
    """Serves ``behaviours`` in turn, starting over at the end; ends with its context."""

    def __init__(self, *behaviours: Behaviour, model: str = "fake") -> None:
        self.calls: list[Call] = []
        self.model = model
        self.url = ""
        self.port = 0
        self._behaviours: Sequence[Behaviour] = behaviours or (good,)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._ready = threading.Event()
        self._stop = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            number = 0
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.rstrip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                path = first.split()[1]
                call = Call(path, headers, json.loads(body) if body else {}, writer, number)
                if path == "/v1/models":
                    call.plain("200 OK", json.dumps({"object": "list", "data": [{"id": self.model}]}).encode())
                    continue
                self.calls.append(call)
                behaviour = self._behaviours[(len(self.calls) - 1) % len(self._behaviours)]
                if not await behaviour(call):
                    break
                await writer.drain()
                number += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()
