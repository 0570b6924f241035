"""Conversations whose pages are kept: how a request names one, and the questions about them to the scheduler."""

from __future__ import annotations

from ringserve.messages.structs import Message, Part


class SessionRef(Part, frozen=True):
    """A conversation whose pages are kept from turn to turn."""

    owner: str
    """Who alone may use, list and drop it: the name of the key that it came with, or what a header says."""
    session_id: str


class SessionInfo(Part, frozen=True):
    """What is kept of a session."""

    session_id: str
    num_tokens: int
    """A next turn that begins with them does not compute them again."""
    num_pages: int
    age_ns: int
    """Since its first turn ended."""
    idle_ns: int
    """Since it was used last."""
    expires_in_ns: int


class ListSessions(Message, frozen=True):
    """Answered by the scheduler with SessionList."""

    request_id: int
    owner: str


class SessionList(Message, frozen=True):
    """Answer to ListSessions."""

    request_id: int
    sessions: tuple[SessionInfo, ...]


class DropSession(Message, frozen=True):
    """Keep a session no longer. Answered by the scheduler with SessionDropped."""

    request_id: int
    session: SessionRef


class SessionDropped(Message, frozen=True):
    """Answer to DropSession."""

    request_id: int
    found: bool
