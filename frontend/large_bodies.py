"""JSON of many megabytes, decoded piece by piece: streams go on in between.

A decoder makes objects of what it reads and nothing else runs meanwhile: half a second for millions of token ids, three
for as many messages. Skipping values is ten times as fast, so they are found first, without a look inside, and then
decoded in turns of the event loop. Knows JSON, and no body.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

import msgspec

from ringserve.frontend.errors import invalid

T = TypeVar("T")

PIECE: Final = 256 * 1024
"""Bytes decoded in one turn of the loop, 2 to 4 ms."""
MAX_ITEMS: Final = 65_536
"""Texts, lists and objects in one array of a large body: what is made of them takes long as well. Numbers have no bound
here."""
_LEVELS: Final = 4
"""A message's parts: body, messages, message, content. What lies deeper is decoded at once."""


async def decode(data: bytes) -> Any:
    """As ``msgspec.json.decode``, and with its errors.

    Raises:
        ApiError: 400; an array has more than ``MAX_ITEMS`` texts, lists or objects.
    """
    return await _Decoding().decoded(data.strip(b" \t\r\n"), _LEVELS)


class _Decoding:
    """One body's."""

    def __init__(self) -> None:
        self._bytes = 0

    async def decoded(self, data: bytes, levels: int) -> Any:
        """Of which ``levels`` levels, this one included, are taken apart where they are large."""
        if len(data) <= PIECE or not levels or data[:1] not in (b"[", b"{"):
            return await self._at_once(data, Any)
        if data[:1] == b"{":
            fields = await self._at_once(data, dict[str, msgspec.Raw])
            return {name: await self.decoded(bytes(field), levels - 1) for name, field in fields.items()}
        if not any(mark in data for mark in (b'"', b"{")) and data.find(b"[", 1) < 0:
            return await self._plain_values(data)
        items = await self._at_once(data, list[msgspec.Raw])
        if len(items) > MAX_ITEMS:
            raise invalid(f"The JSON body has an array of {len(items)} values; at most {MAX_ITEMS} are taken.")
        return [await self.decoded(bytes(item), levels - 1) for item in items]

    async def _plain_values(self, data: bytes) -> list[Any]:
        """Of an array of numbers, true, false and null: every comma ends one."""
        msgspec.json.decode(data, type=msgspec.Raw)  # what is wrong with it is wrong as a whole
        values: list[Any] = []
        start, last = 1, len(data) - 1
        while start < last:
            comma = data.find(b",", start + PIECE)
            end = comma if comma >= 0 else last
            values += await self._at_once(b"[" + data[start:end] + b"]", list[Any])
            start = end + 1
        return values

    async def _at_once(self, data: bytes, of: type[T]) -> T:
        value = msgspec.json.decode(data, type=of)
        self._bytes += len(data)
        if self._bytes >= PIECE:
            self._bytes = 0
            await asyncio.sleep(0)
        return value
