"""A digest of Python source: what tells results of one version of the code from those of another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path


@cache
def source_digest(directory: Path) -> bytes:
    """A digest of the names and contents of a directory's Python files."""
    return files_digest(sorted(directory.glob("*.py")))


def files_digest(paths: Iterable[Path]) -> bytes:
    """A digest of the names and contents of files. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()
