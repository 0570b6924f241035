"""Errors that a client sees, in OpenAI's nested body: ``{"error": {message, type, param, code}}``.

``code`` is a string or null, as OpenAI's schema wants it (strict validators refuse an integer).

    ApiError            an answer with a status
    ClientGone          nobody is left to answer
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ringserve.messages.requests import RequestRefused

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"
PREDICTED_WAIT_HEADER = "x-ringserve-predicted-wait-ms"
"""Milliseconds that a refused request would have waited for its first step."""

_QUOTED_CHARACTERS = 200


class ApiError(Exception):
    """An HTTP error answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        predicted_wait: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or (INVALID_REQUEST if status < 500 else SERVER_ERROR)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))
            self.headers["retry-after-ms"] = str(max(1, math.ceil(retry_after * 1e3)))
        if predicted_wait is not None:
            self.headers[PREDICTED_WAIT_HEADER] = str(max(0, round(predicted_wait * 1e3)))

    @classmethod
    def of_refusal(cls, refused: RequestRefused) -> ApiError:
        """What a process behind the frontend said of a request."""
        return cls(
            refused.status,
            refused.message,
            type=refused.type,
            param=refused.param,
            code=refused.code,
            retry_after=refused.retry_after,
            predicted_wait=refused.predicted_wait,
        )

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())


class ClientGone(Exception):
    """The client closed its connection (or was cut off) before its answer was complete."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400, with the parameter at fault."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after: float, status: int, predicted_wait: float | None = None) -> ApiError:
    """More than the server takes on: 503 or 429, with the time after which it is worth asking again."""
    kind = RATE_LIMIT if status == 429 else SERVER_ERROR
    return ApiError(
        status, message, type=kind, code="overloaded", retry_after=retry_after, predicted_wait=predicted_wait
    )


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=5.0)


def engine_died() -> ApiError:
    return ApiError(
        503, "A process of the server has died; the server is going down.", code="engine_died", retry_after=5.0
    )


def loading() -> ApiError:
    return ApiError(
        503, "The model is still loading; GET /health shows how far it is.", code="loading", retry_after=2.0
    )


def shortened(text: str) -> str:
    """User input quoted in a message: never more than a line of it."""
    return text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "..."
