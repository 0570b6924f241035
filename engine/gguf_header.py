"""The metadata of a GGUF file: key-value pairs in front of the tensors, read without the ``gguf`` package.

The format is described in ggml's ``docs/gguf.md``: magic, version, number of tensors, number of pairs, then each pair
as (key, value type, value); strings are a 64-bit length and UTF-8 bytes; everything is little-endian.

Reads through mmap, so only the pages of the header are touched. Knows nothing about tensors, models or tokenizers.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, Final

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""GGUF's value type -> struct's letter."""
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_MAX_DEPTH: Final = 4
"""Arrays of arrays are allowed by the format and used by nobody; a hostile file must not exhaust the stack."""
_MIN_PAIR: Final = 8 + 4 + 1
"""Bytes of the smallest key-value pair."""


class GgufError(ValueError):
    """The file is not a GGUF file this reader understands, or it is damaged. One line, without the path."""


class _Cursor:
    """A bounds-checked position in a buffer."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    @property
    def remaining(self) -> int:
        return self._size - self._at

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise GgufError(
                f"truncated: the header needs {count} bytes at offset {self._at}, {self.remaining} are left"
            )
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def string(self) -> str:
        # Vocabularies hold pieces that are no valid UTF-8 in a few old files; they must not stop the others.
        return self.take(self.u64()).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        letter = _SCALARS.get(kind)
        if letter is None:
            raise GgufError(f"damaged: unknown value type {kind} at offset {self._at}")
        layout = struct.Struct("<" + letter)
        return layout.unpack(self.take(layout.size))[0]

    def _array(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise GgufError(f"damaged: arrays nested more than {_MAX_DEPTH} deep")
        kind, count = self.u32(), self.u64()
        letter = _SCALARS.get(kind)
        if letter is not None:
            size = struct.calcsize("<" + letter)
            if count > self.remaining // size:
                raise GgufError(f"truncated: an array of {count} values, {self.remaining} bytes are left")
            return list(struct.unpack(f"<{count}{letter}", self.take(count * size)))
        if count > self.remaining // 8:  # a string's length and a nested array's header take 8 bytes at least
            raise GgufError(f"truncated: an array of {count} values, {self.remaining} bytes are left")
        if kind == _STRING:
            string = self.string
            return [string() for _ in range(count)]
        return [self.value(kind, depth) for _ in range(count)]


def parse_gguf_metadata(data: mmap.mmap | bytes) -> dict[str, Any]:
    """All key-value pairs of a GGUF file's header.

    Args:
        data: the file from its first byte; whatever follows the header is not looked at.

    Raises:
        GgufError: not GGUF, an unsupported version or byte order, truncated or damaged.
    """
    cursor = _Cursor(data)
    if len(data) < 24 or cursor.take(4) != _MAGIC:
        raise GgufError("not a GGUF file (it does not begin with 'GGUF')")
    version = cursor.u32()
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in _VERSIONS:
            raise GgufError("a big-endian GGUF file; convert it to little-endian")
        raise GgufError(f"GGUF version {version} is not supported (supported: 2 and 3)")
    cursor.u64()  # number of tensors
    num_pairs = cursor.u64()
    if num_pairs > cursor.remaining // _MIN_PAIR:
        raise GgufError(f"truncated: {num_pairs} metadata entries, {cursor.remaining} bytes are left")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """``parse_gguf_metadata`` of a file.

    Raises:
        GgufError: as above. OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # mmap refuses empty files
            raise GgufError("not a GGUF file (it is empty)") from None
        with data:
            return parse_gguf_metadata(data)
