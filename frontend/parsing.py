"""From a request's bytes to a body Struct. Anything wrong with them is a 400 (or 413) that names the place.

msgspec refuses lone surrogates, so that every text that passes here is well-formed Unicode.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from ringserve.frontend import large_bodies
from ringserve.frontend.errors import ApiError, ClientGone, invalid, shortened
from ringserve.frontend.parameters import check_names

B = TypeVar("B", bound=msgspec.Struct)

LARGE = 1024 * 1024
"""Bytes of a body from which on it is decoded in pieces; all others wait for a smaller one, less than 20 ms."""

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most ``limit`` bytes of it; a larger one is refused before it is read where its length is given."""
    length = request.headers.get("content-length")
    if length is not None and length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        if chunk:
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_struct(request: Request, limit: int, of: type[B]) -> B:
    """The request's JSON body as ``of``."""
    check_content_type(request.headers.get("content-type"))
    return await parse(await read_body(request, limit), of)


def check_content_type(content_type: str | None) -> None:
    """JSON, or nothing said."""
    if content_type is None:
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise invalid(f"Content-Type must be application/json, not {shortened(media_type)}.")


async def parse(data: bytes, of: type[B]) -> B:
    """Decode and check names and types (not ranges)."""
    try:
        body = msgspec.json.decode(data) if len(data) <= LARGE else await large_bodies.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"We could not parse the JSON body of your request: {shortened(str(error))}.") from None
    except RecursionError:
        raise invalid("The JSON body is nested too deeply.") from None
    if not isinstance(body, dict):
        raise invalid(f"The body must be a JSON object, not {type(body).__name__}.")
    check_names(body, frozenset(of.__struct_fields__))
    return _convert(body, of)


def _convert(body: dict[str, Any], of: type[B]) -> B:
    try:
        return msgspec.convert(body, of)
    except msgspec.ValidationError as error:
        what, param = _place(str(error))
        raise invalid(what, param) from None
    except RecursionError:
        raise invalid("The JSON body is nested too deeply.") from None


def _place(message: str) -> tuple[str, str | None]:
    """("Expected `int`, got `str`", "max_tokens") of "Expected `int`, got `str` - at `$.max_tokens`"."""
    found = _PLACE.match(message)
    what, path = (found["what"], found["path"]) if found else (message, None)
    param = path.removeprefix("$").lstrip(".") if path else ""
    if not param or "unknown field" in what or "missing required field" in what:
        name = re.search(r"field `([^`]*)`", what)
        if name:
            param = f"{param}.{name[1]}" if param else name[1]
    if not param:
        return shortened(f"{what}."), None
    return shortened(f"Invalid value for '{param}': {what}."), shortened(param)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")
