"""Debugging: the question whether anything has leaked, which goes through to the scheduler, and its answer."""

from __future__ import annotations

from ringserve.messages.structs import Message


class CheckIntegrity(Message, frozen=True):
    """Debugging: every process on the way adds what it holds; the scheduler answers with IntegrityReport."""

    request_id: int
    tokenizer_requests: int = 0
    """Requests the tokenizer process still holds."""


class IntegrityReport(Message, frozen=True):
    """Answer to CheckIntegrity."""

    request_id: int
    problems: tuple[str, ...]
    """What ``check_integrity()`` found; empty when sound."""
    num_free_pages: int
    num_pages: int
    scheduler_requests: int
    tokenizer_requests: int
    num_free_slots: int
