"""The journal: every request in flight, what was asked and which tokens and characters went out.

It is the truth of a request; everything behind the frontend is soft state that can be computed again from
``JournalEntry.resumed_request``. An entry lives until the final message of each of its choices, also where the client
is long gone: only then are its pages free.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from ringserve.messages.logprobs import TokenLogprob
from ringserve.messages.requests import FinishReason, GenerateRequest, ResumedChoice

S = TypeVar("S")


@dataclass(slots=True)
class ChoiceRecord:
    """One choice of a request."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    characters_sent: int = 0
    started: bool = False
    finish_reason: FinishReason | None = None
    queued_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0


@dataclass(slots=True)
class JournalEntry(Generic[S]):
    """One GenerateRequest."""

    request: GenerateRequest
    sink: S | None
    """Where its output goes; None once the client is gone."""
    choice_offset: int
    """Index of its first choice in the HTTP answer."""
    choices: list[ChoiceRecord]
    unfinished: int
    num_prompt_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """They come with choice 0 only and are shown with every choice."""
    aborted: bool = False

    def resumed_request(self) -> GenerateRequest:
        """The request again, with what was already generated."""
        resumed = tuple(
            ResumedChoice(index, record.token_ids.tobytes(), record.characters_sent, record.finish_reason)
            for index, record in enumerate(self.choices)
            if record.token_ids or record.finish_reason is not None
        )
        return msgspec.structs.replace(self.request, resumed=resumed)


class Journal(Generic[S]):
    """Entries by request id."""

    def __init__(self, frontend_index: int) -> None:
        self._entries: dict[int, JournalEntry[S]] = {}
        self._next_id = frontend_index << 48
        self._choices_in_flight = 0

    def new_id(self) -> int:
        """Unique for the server's life; the upper 16 bits say which frontend."""
        self._next_id += 1
        return self._next_id

    def open(self, request: GenerateRequest, sink: S, choice_offset: int) -> JournalEntry[S]:
        records = [ChoiceRecord() for _ in range(request.n)]
        entry = JournalEntry(request, sink, choice_offset, records, unfinished=request.n)
        self._entries[request.request_id] = entry
        self._choices_in_flight += request.n
        return entry

    def get(self, request_id: int) -> JournalEntry[S] | None:
        return self._entries.get(request_id)

    def finish_choice(self, entry: JournalEntry[S], choice: int, reason: FinishReason) -> None:
        """The final message of a choice; the last one closes the entry."""
        entry.choices[choice].finish_reason = reason
        entry.unfinished -= 1
        self._choices_in_flight -= 1
        if entry.unfinished == 0:
            del self._entries[entry.request.request_id]

    def close(self, entry: JournalEntry[S]) -> None:
        """The whole request is over: it was refused."""
        self._choices_in_flight -= entry.unfinished
        entry.unfinished = 0
        del self._entries[entry.request.request_id]

    @property
    def choices_in_flight(self) -> int:
        return self._choices_in_flight

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry[S]]:
        return iter(list(self._entries.values()))
