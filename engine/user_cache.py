"""The directory in which a user's converted and packed models are kept."""

from __future__ import annotations

import os
from pathlib import Path

from ringserve.engine.model_error import ModelError


def user_cache() -> Path:
    """The XDG base directory specification's cache directory, for us. Raises ModelError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "ringserve"
    except RuntimeError as error:  # a user id that the system does not know, as containers have them
        raise ModelError("there is no home directory to keep files in; set HOME or XDG_CACHE_HOME") from error
