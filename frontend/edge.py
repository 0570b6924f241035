"""The outermost ASGI layer: request ids, keys, the Date header, the access log, and the last answer to an exception."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from email.utils import formatdate

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ringserve.frontend.context import TENANT_HEADER, Exchange, open_exchange
from ringserve.frontend.errors import ApiError
from ringserve.frontend.json_response import error_response

logger = logging.getLogger(__name__)
access = logging.getLogger("ringserve.access")

_OPEN_PATHS = frozenset({"/health", "/ready"})
_PROBES = _OPEN_PATHS | {"/metrics"}
"""Asked every few seconds for ever: their lines would drown the others."""


class ApiKeys:
    """The keys that are let in. Comparison takes the same time for every key and every guess."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: str | None) -> str | None:
        """The name of the key ("key-1", "key-2", ...) where there are several; raises 401."""
        if not self._digests or path in _OPEN_PATHS:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = "Incorrect API key provided." if token else "You didn't provide an API key."
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return f"key-{matches.index(True) + 1}" if len(matches) > 1 else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Edge:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys
        self._date = b""
        self._date_second = 0
        self.active = 0
        """Requests being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        exchange = open_exchange(scope, headers.get("x-request-id"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.started = True
                exchange.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"date", self._http_date()),
                    (b"x-request-id", exchange.request_id.encode("latin-1")),
                ]
            elif not message.get("more_body", False):
                exchange.complete = True
            await send(message)

        self.active += 1
        try:
            try:
                key_name = self._keys.check(scope["path"], headers.get("authorization"))
            except ApiError as refusal:
                await error_response(refusal)(scope, receive, send_with_headers)
            else:
                # With several keys, the key says whose request it is: nobody can speak for another.
                exchange.tenant = key_name or headers.get(TENANT_HEADER)
                await self._app(scope, receive, send_with_headers)
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            if not exchange.complete:
                raise  # the server below closes the connection: the answer is visibly incomplete
        finally:
            self.active -= 1
            _log(scope, exchange)

    def _http_date(self) -> bytes:
        second = int(time.time())
        if second != self._date_second:
            self._date_second, self._date = second, formatdate(second, usegmt=True).encode()
        return self._date


def _log(scope: Scope, exchange: Exchange) -> None:
    milliseconds = (time.monotonic_ns() - exchange.received_ns) / 1e6
    client = scope.get("client")
    access.log(
        logging.DEBUG if scope["path"] in _PROBES else logging.INFO,
        '%s "%s %s" %d tokens=%s %.1f ms id=%s',
        client[0] if client else "-",
        scope["method"],
        scope["path"][:200].encode("unicode_escape").decode("ascii"),
        exchange.status,
        exchange.tokens or "-",
        milliseconds,
        exchange.request_id,
    )
