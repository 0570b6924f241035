"""``@compiled``: numba's nopython mode without the GIL, with a cache on disk that knows all source it was made from.

numba's own cache looks at the file of the function alone, but our functions inline instructions, functions and numbers
of other files; a changed ``llvm.py`` must not leave old machine code behind. The stamp is therefore a digest of every
file of this package and of the one above it, whose constants are compiled in. The cache lies beside the source
(``__pycache__``) or, where that cannot be written, in the user's cache directory; where neither can be written, or a
disk is full, functions are compiled at every start. What is damaged is compiled anew.

Arithmetic is exact IEEE, no ``fastmath``: a row's result must not depend on how a loop was vectorised around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    UserWideCacheLocator,
)

from ringserve.kernels.source_digest import source_digest as source_digest

F = TypeVar("F", bound=Callable[..., Any])

SOURCES = (Path(__file__).parent, Path(__file__).parents[1])
"""Directories whose Python files may be compiled into a function."""


def _stamp() -> bytes:
    return b"".join(source_digest(directory) for directory in SOURCES)


class _InTree(InTreeCacheLocator):  # type: ignore[misc]
    def get_source_stamp(self) -> bytes:
        return _stamp()


class _UserWide(UserWideCacheLocator):  # type: ignore[misc]
    def get_source_stamp(self) -> bytes:
        return _stamp()

    def ensure_cache_path(self) -> None:
        if not Path(self.get_cache_path()).is_absolute():  # a literal "~": a user without a home directory
            raise OSError("there is no user's cache directory")
        super().ensure_cache_path()


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_InTree, _UserWide)


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """An index and its data files, none of them trusted.

    A write that was cut short by a full disk or the end of the process leaves an index that names an older version's
    data, and two processes that add entries at once may name the same file: data say themselves what they are.
    """

    def _load_index(self) -> dict[Any, str]:
        try:
            found: dict[Any, str] = super()._load_index()
        except Exception:  # a damaged pickle raises anything; files of others may be unreadable
            return {}
        return found

    def load(self, key: Any) -> Any:
        try:
            kept = super().load(key)
        except Exception:  # as above
            return None
        if not isinstance(kept, tuple) or len(kept) != 3 or kept[:2] != (self._source_stamp, key):
            return None
        return kept[2]

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (self._source_stamp, key, data))


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk, or no directory any more: compile again at the next start
            super().save_overload(sig, data)

    def has_entry(self, codegen: Any) -> bool:
        """Whether a version for this processor was kept, be it for other types of arguments."""
        return any(key[1] == codegen.magic_tuple() for key in self._cache_file._load_index())


def compiled(function: F) -> F:
    """Compile ``function`` on its first call (from Python or from other compiled code)."""
    dispatcher: Any = njit(nogil=True, boundscheck=False, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # no directory that can be written: compile at every start
        dispatcher._cache = _Cache(function)
    return cast(F, dispatcher)


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether a version of a compiled function for this processor lies in its cache: whether a first call takes no
    time."""
    dispatcher: Any = function
    cache = dispatcher._cache
    return isinstance(cache, _Cache) and cache.has_entry(dispatcher.targetctx.codegen())
