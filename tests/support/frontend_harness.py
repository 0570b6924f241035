"""A frontend on a real socket, with the rest of the server faked in its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import uvloop

from ringserve.actor import ActorContext
from ringserve.config import FrontendConfig, FrontendSettings
from ringserve.frontend.generation import StreamSettings
from ringserve.frontend.server import FrontendActor
from ringserve.messages import FrontendInbound, Started, StartFailed, SupervisorInbound

from fake_tokenizer_process import READY, FakeTokenizer

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
    ) -> None:
        config = config or FrontendConfig()
        self.config = msgspec.structs.replace(config, port=0, debug_endpoints=True)
        self.settings = FrontendSettings(
            index=0, model_name=MODEL, max_num_seqs=max_num_seqs, version="9.9.9", config=self.config
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
        if self._thread.is_alive():
            self.call(self.actor.request_stop)
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
            await self.actor.run()

        try:
            uvloop.run(main())
        except BaseException as error:
            self._exit.set_exception(error)
        else:
            self._exit.set_result(None)


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **more}
