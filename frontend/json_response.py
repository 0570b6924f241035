"""Answers in JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ringserve.frontend.context import CLIENT_GONE, exchange_of
from ringserve.frontend.errors import ApiError


class JsonResponse(Response):
    """A JSON body, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for ApiError."""
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in OpenAI's body."""
    status = getattr(error, "status_code", 500)
    path, method = request.url.path[:200], request.method
    if status == 404:
        message = f"Unknown request URL: {method} {path}."
    elif status == 405:
        message = f"Method {method} is not allowed for {path}."
    else:
        message = str(getattr(error, "detail", "Error"))
    headers = dict(getattr(error, "headers", None) or {})
    return error_response(ApiError(status, message, code="unknown_url" if status == 404 else None, headers=headers))


class NoResponse(Response):
    """Nobody is left to read one."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        return


async def on_exception(request: Request, error: Exception) -> Response:
    """A fault of ours; Starlette raises it again after this answer, so that it is logged."""
    return error_response(
        ApiError(500, "The server had an error while processing your request.", code="internal_error")
    )


async def on_client_gone(request: Request, error: Exception) -> Response:
    exchange_of(request.scope).status = CLIENT_GONE
    return NoResponse()
