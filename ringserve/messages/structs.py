"""What every message, and every piece of one, is: an immutable msgspec Struct, encoded as an array."""

from __future__ import annotations

import msgspec


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a message."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """A member of a ring's union."""
