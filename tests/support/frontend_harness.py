"""A frontend on a real socket, with the rest of the server faked in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import uvloop
from fake_tokenizer_process import READY, FakeTokenizer

from ringserve.actor import ActorContext
from ringserve.config import FrontendConfig, FrontendSettings
from ringserve.frontend.generation import StreamSettings
from ringserve.frontend.server import FrontendActor
from ringserve.messages.rings import FrontendInbound
from ringserve.messages.startup import Started, StartFailed, SupervisorInbound

T = TypeVar("T")
MODEL = "fake-model"


class RunningFrontend:
    """A frontend in a thread of its own."""

    def __init__(
        self,
        config: FrontendConfig | None = None,
        *,
        streams: StreamSettings | None = None,
        ready: bool = True,
        max_num_seqs: int = 8,
        keep_port: bool = False,
        overload_status: int = 503,
    ) -> None:
        config = config or FrontendConfig()
        self.config = msgspec.structs.replace(config, port=config.port if keep_port else 0, debug_endpoints=True)
        self.settings = FrontendSettings(
            index=0,
            model_name=MODEL,
            max_num_seqs=max_num_seqs,
            version="9.9.9",
            config=self.config,
            overload_status=overload_status,
        )
        self.fake = FakeTokenizer()
        self.reports: list[SupervisorInbound] = []
        self.url = ""
        self._streams = streams or StreamSettings()
        self._ready = ready
        self._listening = threading.Event()
        self._exit: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="frontend")

    def __enter__(self) -> RunningFrontend:
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self.actor.request_stop)
        self._thread.join(15)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the frontend's loop."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return result.result(10)

    def wait_until(self, condition: Callable[[], bool], what: str = "the condition") -> None:
        """Look at the frontend's state once per turn of its loop until ``condition`` holds."""

        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(look(), 10), self.loop).result(12)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._exit.result(0)

    def deliver(self, messages: list[FrontendInbound]) -> None:
        for message in messages:
            self.actor.handle(message, "tokenizer-0")
        self.actor.act()

    def statistics(self) -> dict[str, int]:
        return self.call(self.actor.dispatcher.statistics)

    def _report(self, message: SupervisorInbound) -> None:
        self.reports.append(message)
        if isinstance(message, Started):
            self.url = str(message.summary["url"])
        if isinstance(message, Started | StartFailed):
            self._listening.set()

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            context = ActorContext(
                role="frontend-0",
                settings=self.settings,
                outboxes={"tokenizer-0": self.fake},
                report=self._report,
                flush_soon=lambda: None,
            )
            self.actor = FrontendActor(context, self._streams)
            self.fake.deliver = self.deliver
            if self._ready:
                self.deliver([READY])
            self.life = asyncio.ensure_future(self.actor.run())
            await self.life

        try:
            uvloop.run(main())
        except BaseException as error:
            self._exit.set_exception(error)
        else:
            self._exit.set_result(None)


class RawClient:
    """A connection whose bytes are in our hands."""

    def __init__(self, frontend: RunningFrontend, receive_buffer: int | None = None) -> None:
        host, port = frontend.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(10)
        self.socket.connect((host, int(port)))

    def post(self, path: str, body: dict[str, Any], headers: str = "", version: str = "1.1") -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
        self.socket.sendall(head.encode() + data)

    def read_all(self) -> bytes:
        """What comes until the server closes the connection."""
        data = b""
        while piece := self.socket.recv(65536):
            data += piece
        return data

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while end not in data:
            piece = self.socket.recv(65536)
            assert piece, data
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **more}
