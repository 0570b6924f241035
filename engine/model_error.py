"""The exceptions of a model that cannot be served."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be loaded or would not be served right: one line, with the reason and the remedy."""


class UnsupportedDeviceError(ModelError):
    """The same of one device, where another may serve the model."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type where it has none: what fits into a one-line reason."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
