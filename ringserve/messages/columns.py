"""Columns of numbers in a message: packed native integers and floats.

Token ids travel as packed ``int32`` bytes, never as lists: encoding 1,024 ids costs 0.4 us instead of 8, decoding 0.5
instead of 48. Both ends are on one machine, so the byte order is its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


def pack_i32(values: Iterable[int]) -> bytes:
    """Pack integers as native int32 bytes."""
    return array("i", values).tobytes()


def unpack_i32(data: bytes) -> memoryview[int]:
    """A view of packed int32 values; indexing and ``tolist()`` give Python ints."""
    return memoryview(data).cast("i")


def pack_u64(values: Iterable[int]) -> bytes:
    """Pack integers as native uint64 bytes."""
    return array("Q", values).tobytes()


def unpack_u64(data: bytes) -> memoryview[int]:
    """A view of packed uint64 values."""
    return memoryview(data).cast("Q")


def pack_f32(values: Iterable[float]) -> bytes:
    """Pack floats as native float32 bytes."""
    return array("f", values).tobytes()


def unpack_f32(data: bytes) -> memoryview[float]:
    """A view of packed float32 values."""
    return memoryview(data).cast("f")
