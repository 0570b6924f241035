"""Writing a stream's body: bounded waiting for the socket, and a clock for keep-alive comments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Send

from ringserve.frontend.errors import ClientGone


class SocketWriter:
    """One stream's way to its socket."""

    def __init__(self, send: Send, transport: asyncio.WriteTransport | None, stall_timeout: float) -> None:
        self._send = send
        self._transport = transport
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
        self._writing = False
        self._stalled = False
        self.keep_alive_due = False
        """The stream was silent for the interval; reset by the next write."""

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Hand ``data`` to the socket; raises ClientGone if it takes nothing for the stall timeout."""
        guard = self._guard()
        self._writing = True
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        finally:
            self._writing = False
            if guard is not None:
                guard.cancel()
        if self._stalled:
            raise ClientGone("the client did not read its stream")
        self._last_write = self._loop.time()
        self.keep_alive_due = False

    @contextmanager
    def keep_alive(self, interval: float, wake: Callable[[], None]) -> Iterator[None]:
        """Within: set ``keep_alive_due`` and call ``wake`` after ``interval`` seconds without a write (0: never).

        One timer for each stream and interval, however many tokens pass.
        """
        if interval <= 0:
            yield
            return

        def check() -> float:
            silence = self._loop.time() - self._last_write
            if silence < interval:
                return interval - silence
            if not self._writing:
                self.keep_alive_due = True
                wake()
            return interval

        timer = _Timer(self._loop, interval, check)
        try:
            yield
        finally:
            timer.cancel()

    def _guard(self) -> _Timer | None:
        """Watch a write that may have to wait: what lies before it must shrink within every stall timeout."""
        transport = self._transport
        if transport is None or transport.get_write_buffer_size() == 0:
            return None
        size = transport.get_write_buffer_size()

        def check() -> float | None:
            nonlocal size
            left = transport.get_write_buffer_size()
            if left < size:
                size = left
                return self._stall_timeout
            self._stalled = True
            transport.abort()
            return None

        return _Timer(self._loop, self._stall_timeout, check)


class _Timer:
    """Calls ``check`` after ``delay`` seconds, and again after as many as it returns (None: not again)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delay: float, check: Callable[[], float | None]) -> None:
        self._loop = loop
        self._check = check
        self._handle = loop.call_later(delay, self._fire)

    def _fire(self) -> None:
        delay = self._check()
        if delay is not None:
            self._handle = self._loop.call_later(delay, self._fire)

    def cancel(self) -> None:
        self._handle.cancel()
