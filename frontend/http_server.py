"""uvicorn, quietened: no signal handlers, no periodic tick, a socket of our own, and bounded shutdown.

An idle server makes no wake-ups: uvicorn's loop that looks around ten times a second is replaced by an event, and the
Date header that it kept up to date is added by ``edge``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ringserve.frontend.context import TRANSPORT_KEY
from ringserve.frontend.errors import ApiError

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
_HEAD_SECONDS = 75
_HEAD_BYTES = 64 * 1024
"""A request line and headers that are longer, or that take longer, are refused: nothing else bounds them, and they
come before any key is checked."""
_PIPELINED = 8
"""Requests read ahead on a connection. Beyond, reading stops, and with it the sight of a client that leaves."""
_BACKLOG = 2048
_CLOSE_SECONDS = 2.0
_UNREAD_MILLISECONDS = 60_000
"""A complete answer that its client does not read is dropped by the kernel after this, with its connection; without a
limit, such a connection would stay for as long as the client likes."""


class BindError(Exception):
    """The address cannot be listened on; the message has the remedy."""


def bind(host: str, port: int) -> socket.socket:
    """A listening address; port 0 takes a free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BindError(f"cannot listen on {host}: {error.strerror or error}; choose another with --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MILLISECONDS
        )  # accepted ones inherit it
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise BindError(f"port {port} on {host} is already in use; choose another with --port") from None
        option = "--port" if error.errno == errno.EACCES else "--host"
        raise BindError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with {option}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where to reach it from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class UntilClose:
    """The application for an HTTP/1.0 client, which knows no chunks: an answer without a length is sent as it is, and
    the end of the connection ends it."""

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        cycle = self._cycle
        has_length = False

        async def send_plain(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts it down
            await send(message)

        await self._app(scope, receive, send_plain)


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with the transport in reach of the application, JSON for broken requests, bounds on
    a request's head, answers that HTTP/1.0 clients can read, and clients seen to leave also when they have sent more
    than the request being answered."""

    _running: RequestResponseCycle | None = None
    """What is being answered; uvicorn's ``cycle`` is what was read last."""
    _in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_is_complete()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self._refuse(431, f"The request's headers are larger than {_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, dict[object, object]] = {TRANSPORT_KEY: {"transport": self.transport}}
        self.scope["extensions"] = extensions
        self._in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_complete()
        super().on_headers_complete()
        if 0 < len(self.pipeline) < _PIPELINED:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        self._head_is_complete()
        if self.transport.is_closing():
            return
        body = ApiError(status, message).encoded()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, self._on_head_timeout)

    def _head_is_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if cycle.scope["http_version"] < "1.1":
            cycle.keep_alive = False
            cycle.waiting_for_100_continue = False  # to be ignored in HTTP/1.0 (RFC 9110, section 10.1.1)
            app = UntilClose(app, cycle)
        super()._start_asgi_task(cycle, app)


class HttpServer(uvicorn.Server):
    """Serves until ``stop``."""

    def __init__(self, app: ASGIApp, on_listening: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self._on_listening = on_listening
        self._stop = asyncio.Event()
        self._close_seconds = _CLOSE_SECONDS

    @property
    def num_connections(self) -> int:
        return len(self.server_state.connections)

    def stop(self, close_seconds: float = _CLOSE_SECONDS) -> None:
        """Close everything and let ``serve`` return; answers get ``close_seconds`` to reach their clients."""
        self._close_seconds = close_seconds
        self.should_exit = True
        self._stop.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def main_loop(self) -> None:
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers that are complete get a moment to reach their clients; who is left then is cut off."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._close_seconds
        while connections and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(connections):
            connection.transport.abort()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the process's skeleton."""
        yield
