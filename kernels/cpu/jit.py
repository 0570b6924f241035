"""How this package's functions are compiled: once on this machine, kept beside the package.

``@compiled`` is numba's ``njit`` without the GIL and without relaxed arithmetic (the order of additions is part of what
the kernels promise), with one difference: numba asks only whether a function's own file changed before it takes a kept
version, here the stamp covers every file of the package, since a function contains those that it calls. Where the
installation's directory cannot be written to, numba keeps the code in the user's cache directory.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

PACKAGE = Path(__file__).resolve().parent


@functools.lru_cache(maxsize=1)
def package_stamp() -> str:
    """A digest of every source file of this package."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.glob("*.py")):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _InstallationLocator(caching.InTreeCacheLocator):  # type: ignore[misc]
    def get_source_stamp(self) -> str:
        return package_stamp()


class _UserLocator(caching.UserWideCacheLocator):  # type: ignore[misc]
    def get_source_stamp(self) -> str:
        return package_stamp()


class _CacheImpl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_InstallationLocator, _UserLocator)


class _FunctionCache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl


def compiled(function: Callable[..., Any]) -> Any:
    """Compile ``function`` at its first call, or take the kept version."""
    dispatcher = numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)
    dispatcher._cache = _FunctionCache(function)
    return dispatcher


def is_kept(dispatcher: Any) -> bool:
    """Whether some version of the function lies in a cache: whether a first call will not compile."""
    file = dispatcher._cache._cache_file
    return bool(file._load_index())
