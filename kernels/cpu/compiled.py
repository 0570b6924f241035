"""``@compiled``: numba's nopython mode without the GIL, with a cache on disk that knows all of this package's source.

numba's own cache looks at the file of the function alone, but our functions inline instructions and functions of other
files; a changed ``llvm.py`` must not leave old machine code behind. The stamp is therefore a digest of every file of
the package. The cache lies beside the source (``__pycache__``) or, where that cannot be written, in the user's cache
directory; where neither can be written, functions are compiled at every start.

Arithmetic is exact IEEE, no ``fastmath``: a row's result must not depend on how a loop was vectorised around it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, InTreeCacheLocator, UserWideCacheLocator

F = TypeVar("F", bound=Callable[..., Any])


@cache
def source_digest(directory: Path) -> bytes:
    """A digest of the names and contents of a directory's Python files."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


class _InTree(InTreeCacheLocator):  # type: ignore[misc]
    def get_source_stamp(self) -> bytes:
        return source_digest(Path(__file__).parent)


class _UserWide(UserWideCacheLocator):  # type: ignore[misc]
    def get_source_stamp(self) -> bytes:
        return source_digest(Path(__file__).parent)


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_InTree, _UserWide)


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl


def compiled(function: F) -> F:
    """Compile ``function`` on its first call (from Python or from other compiled code)."""
    dispatcher: Any = njit(nogil=True, boundscheck=False, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # no directory that can be written: compile at every start
        dispatcher._cache = _Cache(function)
    return cast(F, dispatcher)


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether a version of a compiled function lies in its cache: whether a first call takes no time."""
    dispatcher: Any = function
    cache = dispatcher._cache
    return isinstance(cache, _Cache) and bool(cache._cache_file._load_index())
