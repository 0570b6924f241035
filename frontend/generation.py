"""One generation over HTTP: submit, wait, answer whole or as a stream, and give up when the client does.

The status line is held back until the engine's first output or refusal, so that a refusal is a real HTTP status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from ringserve.frontend import sse
from ringserve.frontend.answers import AnswerFormat
from ringserve.frontend.context import CLIENT_GONE, Exchange, exchange_of
from ringserve.frontend.dispatcher import Call, Dispatcher, Plan
from ringserve.frontend.errors import ApiError, ClientGone
from ringserve.frontend.socket_writer import SocketWriter
from ringserve.frontend.stream import ChoiceOutput, OutputCollector, OutputStream
from ringserve.frontend.usage import Usage
from ringserve.messages.text_outputs import TextFinish, TextStart

NOTICE_HEADER = "x-ringserve-notice"


@dataclass(frozen=True)
class StreamSettings:
    """How streams are kept within bounds."""

    keep_alive_interval: float = 15.0
    """Seconds of silence after which a comment is sent; 0: never."""
    max_buffered_bytes: int = 1024 * 1024
    """A stream that has more waiting for its socket is given up."""
    stall_timeout: float = 30.0
    """Seconds without the socket taking anything after which a stream is given up."""


@dataclass(frozen=True)
class AnswerHead:
    """What all frames of an answer say."""

    id: str
    model: str
    created: int

    @classmethod
    def new(cls, prefix: str, suffix: str, model: str) -> AnswerHead:
        return cls(f"{prefix}-{suffix}", model, int(time.time()))

    def body(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


class Generation:
    """An ASGI response that runs a plan."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        plan: Plan,
        head: AnswerHead,
        answer_format: AnswerFormat,
        *,
        stream: bool,
        include_usage: bool,
        continuous_usage: bool,
        settings: StreamSettings,
        on_disconnect: Callable[[], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._plan = plan
        self._head = head
        self._format = answer_format
        self._stream = stream
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._settings = settings
        self._on_disconnect = on_disconnect
        self._usage = Usage(plan.n)

    @property
    def _num_choices(self) -> int:
        return self._plan.n * len(self._plan.prompts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        if self._stream:
            stream = OutputStream(self._num_choices, self._settings.max_buffered_bytes, exchange.cut_connection)
            call = self._dispatcher.submit(self._plan, stream)
            answer: Awaitable[None] = self._answer_stream(exchange, stream, send)
        else:
            collector = OutputCollector(self._num_choices)
            call = self._dispatcher.submit(self._plan, collector)
            answer = self._answer_whole(collector, send)
        watch = asyncio.get_running_loop().create_task(self._watch(call, receive))
        try:
            await answer
        except ClientGone:
            exchange.status = CLIENT_GONE
            exchange.cut_connection()
            if exchange.transport is not None:
                await watch  # the server below has then seen the end, too, and does not miss the rest of the answer
        finally:
            self._dispatcher.cancel(call, ClientGone())  # nothing to cancel unless the answer was cut short
            watch.cancel()
            exchange.tokens = f"{self._usage.prompt_tokens}+{self._usage.completion_tokens}"

    async def _watch(self, call: Call, receive: Receive) -> None:
        """Abort as soon as the client is seen to be gone, whatever the answering task waits for."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if any(entry.unfinished for entry in call.entries) and not call.closed:
            self._on_disconnect()
            self._dispatcher.cancel(call, ClientGone())

    # ------------------------------------------------------------------------------------------------ whole

    async def _answer_whole(self, collector: OutputCollector, send: Send) -> None:
        collected = await collector.all()
        notices: list[str] = []
        for index, choice in enumerate(collected):
            if choice.start is not None:
                self._usage.start(index, choice.start)
                notices += self._notices(choice.start)
            assert choice.finish is not None
            self._usage.finish(index, choice.finish)
            check_finish(choice.finish)
        body = self._head.body(self._format.whole)
        body["choices"] = [self._format.choice(index, choice) for index, choice in enumerate(collected)]
        body["usage"] = self._usage.body()
        headers = {"content-type": "application/json"}
        if notices:
            body["notice"] = headers[NOTICE_HEADER] = notices[0]
        data = msgspec.json.encode(body)
        headers["content-length"] = str(len(data))
        await _start(send, headers)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    # ----------------------------------------------------------------------------------------------- stream

    async def _answer_stream(self, exchange: Exchange, stream: OutputStream, send: Send) -> None:
        outputs = await stream.take()
        while not outputs:
            outputs = await stream.take()
        for output in outputs:
            if output.finish is not None:
                check_finish(output.finish)  # before anything was said: a real status
        notices = [notice for output in outputs if output.start for notice in self._notices(output.start)]
        await _start(send, {**sse.HEADERS, **({NOTICE_HEADER: notices[0]} if notices else {})})
        writer = SocketWriter(send, exchange.transport, self._settings.stall_timeout)
        with writer.keep_alive(self._settings.keep_alive_interval, stream.wake):
            await self._write_frames(writer, stream, outputs, notices)

    async def _write_frames(
        self, writer: SocketWriter, stream: OutputStream, outputs: list[ChoiceOutput], notices: list[str]
    ) -> None:
        frames = sse.ChunkFrames(self._head.body(self._format.chunk))
        extra: dict[str, Any] = {"notice": notices[0]} if notices else {}
        data = bytearray()
        try:
            while True:
                for output in outputs:
                    if output.finish is not None:
                        check_finish(output.finish)
                    self._count(output)
                    for choice in self._format.chunks(output):
                        data += frames.frame([choice], {**self._frame_usage(), **extra})
                        extra = {}
                if stream.finished:
                    break
                if data:
                    await writer.write(bytes(data))
                    data.clear()
                elif writer.keep_alive_due:
                    await writer.write(sse.KEEP_ALIVE)
                outputs = await stream.take()
            if self._include_usage:
                data += frames.frame([], {"usage": self._usage.body()})
        except ApiError as error:
            data += sse.frame(error.body())
        await writer.write(bytes(data) + sse.DONE, last=True)

    def _count(self, output: ChoiceOutput) -> None:
        if output.start is not None:
            self._usage.start(output.choice, output.start)
        self._usage.tokens(output.choice, len(output.token_ids))
        if output.finish is not None:
            self._usage.finish(output.choice, output.finish)

    def _frame_usage(self) -> dict[str, Any]:
        """OpenAI: with include_usage every chunk has the field, null in all but the last."""
        if self._continuous_usage:
            return {"usage": self._usage.body()}
        return {"usage": None} if self._include_usage else {}

    def _notices(self, start: TextStart) -> list[str]:
        asked = self._plan.max_tokens
        if not start.max_tokens_clamped or asked is None:
            return []
        return [
            f"max_tokens was reduced from {asked} to {start.max_tokens}: "
            f"the prompt has {start.num_prompt_tokens} tokens and the context is full after that."
        ]


def check_finish(finish: TextFinish) -> None:
    """A choice that the engine could not complete is an error, not an answer."""
    if finish.reason == "error":
        raise ApiError(500, finish.message or "The engine could not complete the request.", code="generation_failed")
    if finish.reason == "abort":
        raise ApiError(500, "The server ended the request before it was complete.", code="aborted")


async def _start(send: Send, headers: dict[str, str]) -> None:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": encoded})
