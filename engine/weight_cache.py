"""Packed weights kept between starts: one file for each model and form, in the user's cache directory.

A file is a header and a payload::

    magic (8 bytes), format version, length of the description, CRC-32 of the description (3 x uint32, little-endian)
    description: JSON with the key, the payload's length and CRC-32, and each array's name, dtype, shape and offset
    zeros up to a multiple of 4096
    payload: the arrays, each at a multiple of 64

Whatever does not agree (another version or key, a length, a checksum) makes the entry absent, and the next ``store``
replaces it. A file appears by rename, complete, so concurrent starts may read, write and remove entries at will: the
worst that happens is that a model is packed twice. The key names what was packed (``source_identity``) and how.

Arrays are read into large pages rather than mapped: a core reads weights 1.5 to 1.8 times as fast from there, because
pages of a mapped file are small on most file systems.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import CACHE_LINE, aligned_zeros

Arrays = Mapping[str, NDArray[Any]]

MAGIC = b"RINGWGTS"
VERSION = 1
DEFAULT_LIMIT = 32 << 30
"""Bytes of all entries together; the least recently used ones go first."""

_HEADER = struct.Struct("<8sIII")
_PAYLOAD_ALIGNMENT = 4096
_LONGEST_DESCRIPTION = 64 << 20
_SUFFIX = ".weights"
_PARTIAL = ".partial-"
_PARTIAL_AGE = 24 * 3600.0
"""Seconds after which an unfinished file belongs to nobody."""


@dataclass(frozen=True)
class Entry:
    """What was stored under a key."""

    arrays: dict[str, NDArray[Any]]
    checksum: int
    """CRC-32 of the payload."""


class WeightCache:
    """Entries in ``directory``, which is made when something is stored."""

    def __init__(self, directory: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.directory = directory
        self._limit = limit

    def load(self, key: str) -> Entry | None:
        """What was stored under ``key``; None where there is nothing, or it is damaged."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                entry = _read(file, key)
        except (OSError, ValueError, MemoryError):
            return None
        with contextlib.suppress(OSError):  # it was used; somebody else's file, or a read-only one, serves as well
            os.utime(path)
        return entry

    def store(self, key: str, arrays: Arrays) -> int:
        """Keep ``arrays``; their checksum. Raises OSError where it cannot be done (a full disk, a directory that cannot
        be written)."""
        partial: Path | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=_PARTIAL, dir=self.directory)
            partial = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                checksum = _write(file, key, arrays)
            partial.rename(self._path(key))
        except OSError:
            if partial is not None:
                with contextlib.suppress(OSError):
                    partial.unlink()
            raise
        with contextlib.suppress(OSError):
            self._clean(self._path(key))
        return checksum

    def _path(self, key: str) -> Path:
        return self.directory / (hashlib.sha256(key.encode()).hexdigest()[:32] + _SUFFIX)

    def _clean(self, kept: Path) -> None:
        """Remove the least recently used entries beyond the limit, and what starts that died have left."""
        now = time.time()
        entries = []
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):  # another process may be cleaning too
                state = path.stat()
                if path.name.startswith(_PARTIAL) and now - state.st_mtime > _PARTIAL_AGE:
                    path.unlink()
                elif path.suffix == _SUFFIX:
                    entries.append((state.st_mtime_ns, state.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._limit:
                break
            if path != kept:
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size


def source_identity(path: Path) -> str:
    """What ``path`` (a GGUF file, or a directory in Hugging Face layout) holds, weights and configuration: names, sizes
    and times of its files and of those that its index names, links followed. Raises OSError.

    The time of the last change of status is among them: a file that replaces another may have its size and, if it was
    copied with its times, its time of modification.
    """
    path.stat()
    files = [path] if path.is_file() else sorted({*path.glob("*.safetensors"), *path.glob("*.json"), *_indexed(path)})
    # A link to nothing holds no weights: transformers reads the files that the index names.
    states = [(str(file.resolve()), file.stat()) for file in files if file.exists()]
    return json.dumps([[name, state.st_size, state.st_mtime_ns, state.st_ctime_ns] for name, state in states])


def _indexed(directory: Path) -> set[Path]:
    """The files that the directory's index names, which may lie in other directories."""
    try:
        parts = json.loads((directory / "model.safetensors.index.json").read_bytes())["weight_map"].values()
        return {directory / str(part) for part in parts}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # none: the loader says so
        return set()


def _write(file: BinaryIO, key: str, arrays: Arrays) -> int:
    entries, end = [], 0
    for name, array in arrays.items():
        entries.append({"name": name, "dtype": array.dtype.str, "shape": array.shape, "offset": end})
        end += -(-array.nbytes // CACHE_LINE) * CACHE_LINE
    checksum = 0
    for array in arrays.values():
        checksum = zlib.crc32(_bytes(array), checksum)
        checksum = zlib.crc32(_padding(array.nbytes, CACHE_LINE), checksum)
    description = json.dumps({"key": key, "payload": end, "crc": checksum, "arrays": entries}).encode()
    header = _HEADER.pack(MAGIC, VERSION, len(description), zlib.crc32(description))
    file.write(header + description + _padding(len(header) + len(description), _PAYLOAD_ALIGNMENT))
    for array in arrays.values():
        file.write(_bytes(array))
        file.write(_padding(array.nbytes, CACHE_LINE))
    return checksum


def _read(file: Any, key: str) -> Entry:
    """Raises ValueError for a file that is not what it should be."""
    size = os.fstat(file.fileno()).st_size
    header = file.read(_HEADER.size)
    if len(header) != _HEADER.size:
        raise ValueError("no header")
    magic, version, length, checksum = _HEADER.unpack(header)
    if magic != MAGIC or version != VERSION or length > min(size, _LONGEST_DESCRIPTION):
        raise ValueError("another format")
    text = file.read(length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise ValueError("a damaged description")
    description = json.loads(text)
    start = -(-(_HEADER.size + length) // _PAYLOAD_ALIGNMENT) * _PAYLOAD_ALIGNMENT
    if description["key"] != key or size != start + description["payload"]:
        raise ValueError("another entry, or a part of one")
    payload: NDArray[np.uint8] = aligned_zeros((description["payload"],), np.uint8)
    file.seek(start)
    filled = 0
    view = payload.data
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            raise ValueError("it ends early")
        filled += count
    if zlib.crc32(view) != description["crc"]:
        raise ValueError("damaged weights")
    arrays = {entry["name"]: _array(payload, entry) for entry in description["arrays"]}
    return Entry(arrays, int(description["crc"]))


def _array(payload: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[Any]:
    dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
    length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    array: NDArray[Any] = payload[entry["offset"] : entry["offset"] + length].view(dtype).reshape(shape)
    return array


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _padding(length: int, alignment: int) -> bytes:
    return bytes(-length % alignment)
