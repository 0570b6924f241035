"""Writes the headers of GGUF files."""

from __future__ import annotations

import struct
from typing import Any

KINDS = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def scalar(letter: str, value: Any) -> bytes:
    return struct.pack("<I" + letter, KINDS[letter], value)


def array(kind: int, count: int, body: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + body


def gguf(pairs: dict[str, bytes], version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs))
    return head + b"".join(string(key) + value for key, value in pairs.items())
