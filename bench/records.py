"""What was seen of one request on the client's clock, and how it can go wrong. Every figure is computed from these."""

from __future__ import annotations

import msgspec


class Failure(msgspec.Struct, frozen=True):
    """Why a request did not end well.

    ``kind`` is one of ``connection_refused``, ``connection_failed`` (no route, name unknown, TLS),
    ``connection_reset``, ``disconnected`` (closed before the answer began), ``truncated`` (closed in the middle),
    ``timeout``, ``http_NNN``, ``invalid_http``, ``malformed`` (not SSE, or not JSON in it), ``server_error`` (an error
    frame in the stream), ``empty`` (a proper end without any token), ``interrupted`` (the user stopped the run; not
    counted as an error).
    """

    kind: str
    message: str


class Usage(msgspec.Struct, frozen=True):
    """The server's own count."""

    prompt_tokens: int | None = None
    completion_tokens: int = 0


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request; times are ``time.perf_counter()`` seconds."""

    due: float
    """When the schedule wanted it sent; ``sent`` in a closed loop."""
    sent: float
    chunk_times: list[float] = []
    """Arrival of each chunk that carries output."""
    chunk_tokens: list[int] | None = None
    """Tokens in each of those chunks, where the server tells (usage in every chunk)."""
    ended: float
    """Arrival of the last byte, or when it failed."""
    asked_prompt_tokens: int | None = None
    """Length of the prompt where the client knows it: token ids."""
    usage: Usage | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    turn: int = 0
    """0 for the first request of a conversation."""
