"""The packed weights of one model in one form, as an earlier start may have kept them.

Reading them needs neither torch nor the kernels, nor the interpreter for long: it goes on while those are imported.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ringserve.engine.model_error import ModelError, first_line
from ringserve.engine.user_cache import user_cache
from ringserve.engine.weight_cache import Entry, WeightCache, source_identity
from ringserve.kernels.source_digest import files_digest, source_digest

PACKING_MODULES = ("decoder_family", "decoder_weights", "fast_packing", "fast_weights")
"""Modules of this package that the packed form, or the way in which weights are rounded, depends on; of the kernels
simply all. A test follows their imports."""
KERNELS = Path(__file__).resolve().parents[1] / "kernels"

logger = logging.getLogger("ringserve.executor")


def packing_digest() -> str:
    """Changes with the code that packs. Raises OSError."""
    modules = files_digest(Path(__file__).with_name(f"{name}.py") for name in PACKING_MODULES)
    return (source_digest(KERNELS) + source_digest(KERNELS / "cpu") + modules).hex()


def weights_directory() -> Path | None:
    """Where packed weights are kept; None, with a line in the log, where there is no place."""
    try:
        return user_cache() / "weights"
    except ModelError as error:
        logger.warning("weights are packed and checked at every start: %s", error)
        return None


class KeptWeights:
    """See the module."""

    def __init__(self, quantization: str, source: Path, directory: Path | None) -> None:
        """``source``: the model's files; ``directory``: of the cache, None: nothing is kept."""
        self._cache = None if directory is None else WeightCache(directory)
        self._source = source
        self.identity = ""
        """Of the model's files, before anything was read from them."""
        self._key = ""
        try:
            self.identity = source_identity(source)
            self._key = json.dumps([self.identity, quantization, packing_digest()])
        except OSError:  # a link to nothing, a file that may not be looked at: whoever loads it will say so
            self._cache = None
        self._entry: Entry | None = None

    def read(self) -> None:
        """Read what is there."""
        self._entry = self._cache.load(self._key) if self._cache is not None else None

    @property
    def directory(self) -> Path | None:
        """Where they are kept, if they are."""
        return None if self._cache is None else self._cache.directory

    @property
    def entry(self) -> Entry | None:
        """What an earlier start left."""
        return self._entry

    def is_current(self) -> bool:
        """Whether the model's files are still those that were there at first."""
        try:
            return source_identity(self._source) == self.identity
        except OSError:
            return False

    def store(self, arrays: dict[str, NDArray[Any]]) -> int | None:
        """Keep what this start has packed, or leave what an earlier one had kept; its checksum, None where it cannot be
        kept (a line in the log says why)."""
        if self._entry is not None:
            return self._entry.checksum
        if self._cache is None:
            return None
        if not self.is_current():
            logger.warning("%s changed while it was loaded: the packed weights are not kept", self._source)
            return None
        try:
            return self._cache.store(self._key, arrays)
        except OSError as error:
            logger.warning(
                "the packed weights cannot be kept in %s (%s): every start will pack and check them; make room there, "
                "or name another directory with XDG_CACHE_HOME",
                self._cache.directory,
                first_line(error),
            )
            return None
