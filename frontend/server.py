"""The frontend process: startup, loop, shutdown.

It owns the client connections and the journal of the requests in flight, and talks to its tokenizer process only. It
listens from the first moment; until ``ExecutorReady`` arrives, generation is answered with 503 and Retry-After.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ringserve.config import FrontendSettings
from ringserve.frontend.app import build_app
from ringserve.frontend.dispatcher import Dispatcher
from ringserve.frontend.errors import engine_died, shutting_down
from ringserve.frontend.generation import StreamSettings
from ringserve.frontend.http_server import BindError, HttpServer, bind, url_of
from ringserve.frontend.metrics import Metrics
from ringserve.frontend.service import Service
from ringserve.messages.rings import FrontendInbound
from ringserve.messages.startup import Started, StartFailed

if TYPE_CHECKING:
    from ringserve.actor import ActorContext, AsyncActor

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 2.0
_DYING_WORDS_SECONDS = 0.3
"""The whole server goes down within a second of a process's death."""


def create(context: ActorContext) -> AsyncActor:
    """The frontend, with the settings of the configuration."""
    settings: FrontendSettings = context.settings
    return FrontendActor(context, StreamSettings(keep_alive_interval=settings.config.sse_keep_alive_interval))


class FrontendActor:
    """An AsyncActor."""

    def __init__(self, context: ActorContext, stream_settings: StreamSettings) -> None:
        settings: FrontendSettings = context.settings
        self._settings = settings
        self._report = context.report
        self.metrics = Metrics(settings.model_name, settings.version)
        self.metrics.observe(context.observers)
        self.dispatcher = Dispatcher(settings, context.outboxes["tokenizer-0"], context.flush_soon, self.metrics)
        self._app = build_app(Service(settings, self.dispatcher, self.metrics, stream_settings))
        self._stop_requested = asyncio.Event()

    async def run(self) -> None:
        config = self._settings.config
        try:
            listener = bind(config.host, config.port)
        except BindError as error:
            self._report(StartFailed(str(error)))
            raise SystemExit(1) from None
        url = url_of(listener)
        server = HttpServer(self._app, lambda: self._report(Started({"url": url})))
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        stopping = asyncio.get_running_loop().create_task(self._stop_requested.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._drain(config.shutdown_timeout)
                server.stop()
            await serving
        except asyncio.CancelledError:  # a neighbour died
            self.dispatcher.draining = True
            self.dispatcher.cancel_all(engine_died())
            await self._idle_within(_DYING_WORDS_SECONDS)
            server.stop(_DYING_WORDS_SECONDS)
            await serving
            raise
        finally:
            stopping.cancel()

    def handle(self, message: FrontendInbound, source: str) -> None:
        self.dispatcher.handle(message)

    def act(self) -> None:
        self.dispatcher.act()

    def request_stop(self) -> None:
        self.dispatcher.draining = True
        self._stop_requested.set()

    async def _drain(self, timeout: float) -> None:
        """Let running requests finish; then end the rest with an error that says why."""
        if await self._idle_within(timeout):
            return
        logger.warning("shutdown timeout: %d requests are ended", self._app.active)
        self.dispatcher.cancel_all(shutting_down())
        await self._idle_within(_LAST_WORDS_SECONDS)

    async def _idle_within(self, timeout: float) -> bool:
        """True once no request is being answered."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self._app.active:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True
