"""Ctrl-C at a moment of our choosing: never between taking a message and noting what it said."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class DeferredInterrupts:
    """Within this context SIGINT only wakes the thread that waits; ``check`` then does what SIGINT would have done.

    Whatever Python handler is installed (the one that raises KeyboardInterrupt, or the user's own) is kept and called
    by ``check``. In other threads than the main one there is nothing to do: signals never interrupt them.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._pending: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if error is None:
                self.check()

    def check(self) -> None:
        """Call the handler if the signal came; raises what it raises."""
        if self._pending is not None and self._handler is not None:
            pending, self._pending = self._pending, None
            self._handler(*pending)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._pending = (signum, frame)
        self._wake()
