"""What belongs to one HTTP exchange: its ids and clocks, and the connection under it."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

_SANE_ID = re.compile(r"[A-Za-z0-9._:@=+-]{1,128}")
TENANT_HEADER = "x-ringserve-tenant"
_SCOPE_KEY = "ringserve.exchange"
CLIENT_GONE = 499
"""Status in the log (nginx's) of a request whose client went away."""
TRANSPORT_KEY = "ringserve.transport"
"""In ``scope["extensions"]``: the connection's asyncio transport."""


@dataclass
class Exchange:
    """One request and its answer; lives in the ASGI scope."""

    request_id: str
    """What X-Request-Id said, or a new one; in every answer's header."""
    tenant: str | None = None
    """Whose key it came with, where there are several keys, else what the header says; None: neither."""
    received_ns: int = field(default_factory=time.monotonic_ns)
    status: int = 0
    tokens: str = ""
    """"prompt+completion" for the access log."""
    transport: asyncio.WriteTransport | None = None
    started: bool = False
    """The status line is out."""
    complete: bool = False
    """The last byte is out."""

    def cut_connection(self) -> None:
        """Close at once, dropping what the client did not take."""
        if self.transport is not None:
            self.transport.abort()


def is_sane_id(request_id: str) -> bool:
    """Short, printable, and safe in headers and logs."""
    return _SANE_ID.fullmatch(request_id) is not None


def open_exchange(scope: Any, request_id: str | None) -> Exchange:
    """Begin an exchange; an id that is not sane is replaced."""
    if request_id is None or not is_sane_id(request_id):
        request_id = uuid.uuid4().hex
    transport = (scope.get("extensions") or {}).get(TRANSPORT_KEY, {}).get("transport")
    exchange = Exchange(request_id, transport=transport)
    scope[_SCOPE_KEY] = exchange
    return exchange


def exchange_of(scope: Any) -> Exchange:
    """The exchange of this scope."""
    exchange = scope[_SCOPE_KEY]
    assert isinstance(exchange, Exchange)
    return exchange
