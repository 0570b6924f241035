"""A lean HTTP/1.1 client: keep-alive connections on asyncio protocols, httptools for the framing.

An answer is kept as it came, as (arrival, bytes) for each read; it wakes its task once, at its end. So a stream costs
one call per read and no task switches, and a time stamp is taken before anything else happens to the bytes. What the
bytes mean is none of this module's business.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import quote, urlsplit

import httptools

from ringserve.bench.records import Failure


@dataclass(frozen=True)
class Endpoint:
    """Where an API lives."""

    scheme: str
    host: str
    port: int
    path: str
    """Prefix of all routes, such as ``/v1``."""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        """From a base URL; ``/v1`` is added where the URL has no path.

        Raises:
            ValueError: not an http or https URL.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        try:
            host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
            host.encode("idna")  # what the resolver would say, before anything is measured
        except UnicodeError:
            raise ValueError(f"{url!r}: {parts.hostname!r} cannot be the name of a host") from None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        path = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        return cls(parts.scheme, host, port, path or "/v1", api_key)

    @property
    def address(self) -> str:
        """``host:port`` as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL."""
        return f"{self.scheme}://{self.address}{self.path}"


@dataclass(slots=True)
class Exchange:
    """One request and what came back (``time.perf_counter()`` seconds)."""

    sent: float
    status: int = 0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """(arrival, bytes of the body)"""
    location: bytes = b""
    """Where a redirection points."""
    ended: float = 0.0
    failure: Failure | None = None

    def body(self) -> bytes:
        """The body so far."""
        return b"".join(data for _, data in self.reads)


class Connection(asyncio.Protocol):
    """One connection with at most one request on it."""

    def __init__(self) -> None:
        self.closed = False
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._framed = False

    async def run(self, payload: bytes, exchange: Exchange, timeout: float) -> None:
        """Send ``payload`` and fill ``exchange`` until the answer's end or its failure."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._exchange, self._done = exchange, loop.create_future()
        self._framed = self.reusable = False
        timer = loop.call_later(
            max(timeout, 0.0), self._fail, "timeout", "no complete answer in the time allowed (--timeout)"
        )
        self._transport.write(payload)
        try:
            await self._done
        except asyncio.CancelledError:
            self._fail("interrupted", "the run was stopped")
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """Drop the connection at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._exchange is None:
            self.close()  # bytes that nobody asked for: not a connection to use again
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("invalid_http", str(error) or type(error).__name__)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._exchange is None:
            return
        self._now = time.perf_counter()
        if self._exchange.status and not self._framed and error is None:
            self._finish(reusable=False)  # a body that ends with its connection
        elif isinstance(error, OSError):
            self._fail("connection_reset", error.strerror or str(error))
        elif self._exchange.status:
            self._fail("truncated", "the connection was closed in the middle of the answer")
        else:
            self._fail("disconnected", "the connection was closed before an answer")

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"location" and self._exchange is not None:
            self._exchange.location = value

    def on_headers_complete(self) -> None:
        """Status and headers are in."""
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._exchange is not None:
            self._exchange.reads.append((self._now, data))

    def on_message_complete(self) -> None:
        """The answer's end."""
        if self._exchange is not None and self._exchange.status >= 200:
            self._finish(reusable=self._parser.should_keep_alive())

    def _finish(self, *, reusable: bool) -> None:
        assert self._exchange is not None
        self._exchange.ended = self._now
        self.reusable = reusable
        self._wake()

    def _fail(self, kind: str, message: str) -> None:
        if self._exchange is not None:
            self._exchange.failure = Failure(kind, message)
            self._exchange.ended = time.perf_counter()
            self._wake()
        self.close()

    def _wake(self) -> None:
        self._exchange = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class HttpClient:
    """A pool of connections to one endpoint, as many as there are requests at once."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.num_retries = 0
        """Requests sent again because the server had closed the idle connection that they were written to."""
        self._tls = ssl.create_default_context() if endpoint.scheme == "https" else None
        self._idle: list[Connection] = []
        key = f"Authorization: Bearer {endpoint.api_key}\r\n" if endpoint.api_key else ""
        self._headers = f"Host: {endpoint.address}\r\nUser-Agent: ringserve-bench\r\nAccept: */*\r\n{key}"

    async def get(self, path: str, timeout: float) -> Exchange:
        """GET of an absolute path. Failures are in the exchange, not raised."""
        exchange = Exchange(time.perf_counter())
        await self._request(f"GET {path} HTTP/1.1\r\n{self._headers}\r\n".encode("latin-1"), timeout, exchange)
        return exchange

    async def post(self, route: str, body: bytes, timeout: float, exchange: Exchange) -> None:
        """POST of JSON to a route below the base. Failures are in the exchange, not raised."""
        head = (
            f"POST {self.endpoint.path}{route} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await self._request(head.encode("latin-1") + body, timeout, exchange)

    def close(self) -> None:
        """Drop the idle connections; called inside the loop, since one left open would keep uvloop from closing."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _request(self, payload: bytes, timeout: float, exchange: Exchange) -> None:
        deadline = exchange.sent + timeout
        while True:
            connection = self._take()
            reused = connection is not None
            if connection is None:
                try:
                    connection = await self._connect(deadline - time.perf_counter())
                except OSError as error:
                    exchange.failure, exchange.ended = _connect_failure(error), time.perf_counter()
                    return
            await connection.run(payload, exchange, deadline - time.perf_counter())
            if connection.reusable and not connection.closed:
                self._idle.append(connection)
            else:
                connection.close()
            failure = exchange.failure
            if not (reused and failure and not exchange.status and failure.kind in _STALE):
                return
            exchange.failure = None
            self.num_retries += 1

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self, timeout: float) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(max(timeout, 0.0)):  # raises TimeoutError, an OSError
            _, connection = await loop.create_connection(
                Connection, self.endpoint.host, self.endpoint.port, ssl=self._tls
            )
        return connection


_STALE = ("connection_reset", "disconnected")


def _connect_failure(error: OSError) -> Failure:
    if isinstance(error, ConnectionRefusedError):
        return Failure("connection_refused", "nothing listens there (connection refused)")
    if isinstance(error, TimeoutError):
        return Failure("timeout", "no connection in the time allowed (--timeout)")
    return Failure("connection_failed", error.strerror or str(error) or type(error).__name__)
