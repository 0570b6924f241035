"""Where a request's output waits for the task that answers it.

``OutputStream`` hands on every piece as it comes, ``OutputCollector`` gathers whole choices. Both are filled from the
doorbell's reader (``put``, ``fail``) and wake their one waiting task at most once for each drain (``wake``). They know
nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ringserve.frontend.errors import ApiError, ClientGone
from ringserve.messages.logprobs import TokenLogprob
from ringserve.messages.text_outputs import TextFinish, TextStart

_OUTPUT_OVERHEAD = 128
_LOGPROB_BYTES = 64


@dataclass(slots=True)
class ChoiceOutput:
    """New output of one choice of an HTTP answer. Any part may be absent."""

    choice: int
    """Index in the answer (over all prompts)."""
    text: str
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...]
    start: TextStart | None
    finish: TextFinish | None

    @property
    def num_bytes(self) -> int:
        """About what it holds while it waits."""
        candidates = sum(1 + len(token.top) for token in self.logprobs)
        return _OUTPUT_OVERHEAD + 4 * len(self.text) + 8 * len(self.token_ids) + _LOGPROB_BYTES * candidates


class Sink(Protocol):
    """What the dispatcher fills."""

    def put(self, output: ChoiceOutput) -> bool:
        """False: the reader is too slow, give the request up."""

    def fail(self, error: ApiError | ClientGone) -> None:
        """No more output will come."""

    def wake(self) -> None:
        """Everything of this drain was put."""


class _Waiter:
    """Lets one task sleep until ``wake``."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            self._future = None

    def wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class OutputStream:
    """Bounded buffer of a streamed answer."""

    def __init__(self, num_choices: int, max_bytes: int, on_overflow: Callable[[], None]) -> None:
        """``on_overflow`` frees the reader from a write that may be waiting for ever."""
        self._on_overflow = on_overflow
        self._waiter = _Waiter()
        self._pending: list[ChoiceOutput] = []
        self._size = 0
        self._max_bytes = max_bytes
        self._unfinished = num_choices
        self._error: ApiError | ClientGone | None = None

    def put(self, output: ChoiceOutput) -> bool:
        self._size += output.num_bytes
        if self._size > self._max_bytes:
            self._pending.clear()
            self._on_overflow()
            return False
        self._pending.append(output)
        if output.finish is not None:
            self._unfinished -= 1
        return True

    def fail(self, error: ApiError | ClientGone) -> None:
        if self._error is None:
            self._error = error

    def wake(self) -> None:
        self._waiter.wake()

    @property
    def finished(self) -> bool:
        """All choices have ended and were taken."""
        return self._unfinished == 0 and not self._pending

    @property
    def size(self) -> int:
        return self._size

    async def take(self) -> list[ChoiceOutput]:
        """What came since the last call; waits if there is nothing (an empty list: woken for another reason)."""
        if not self._pending and self._error is None:
            await self._waiter.wait()
        if isinstance(self._error, ClientGone):
            raise self._error
        taken, self._pending, self._size = self._pending, [], 0
        if not taken and self._error is not None:
            raise self._error
        return taken


@dataclass(slots=True)
class CollectedChoice:
    """A whole choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    start: TextStart | None = None
    finish: TextFinish | None = None


class OutputCollector:
    """Gathers every choice; wakes its task only when all are over."""

    def __init__(self, num_choices: int) -> None:
        self._waiter = _Waiter()
        self._choices = [CollectedChoice() for _ in range(num_choices)]
        self._unfinished = num_choices
        self._error: ApiError | ClientGone | None = None

    def put(self, output: ChoiceOutput) -> bool:
        choice = self._choices[output.choice]
        if output.text:
            choice.texts.append(output.text)
        choice.token_ids.extend(output.token_ids)
        choice.logprobs.extend(output.logprobs)
        if output.start is not None:
            choice.start = output.start
        if output.finish is not None:
            choice.finish = output.finish
            self._unfinished -= 1
        return True

    def fail(self, error: ApiError | ClientGone) -> None:
        if self._error is None:
            self._error = error

    def wake(self) -> None:
        if self._unfinished == 0 or self._error is not None:
            self._waiter.wake()

    async def all(self) -> list[CollectedChoice]:
        """Every choice, once all have ended."""
        if self._unfinished and self._error is None:
            await self._waiter.wait()
        if self._error is not None:
            raise self._error
        return self._choices
