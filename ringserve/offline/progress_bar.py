"""What the terminal shows while a batch is being generated."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

REFRESH_SECONDS = 0.2


class BatchProgress:
    """Prompts done and tokens/s; nothing where nobody looks (no terminal, no notebook).

    Drawn while messages are handled, at most five times a second: no thread of its own.
    """

    def __init__(self, num_prompts: int, shown: bool) -> None:
        console = Console(stderr=True)
        self._began = self._drawn = time.monotonic()
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._done = 0
        self._bar: Progress | None = None
        if shown and (console.is_terminal or console.is_jupyter):
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[rates]}"),
                console=console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("Prompts", total=num_prompts, rates="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._draw(time.monotonic())
            self._bar.stop()

    def update(self, finished: int, prompt_tokens: int, output_tokens: int) -> None:
        """Count what is new since the last call."""
        self._done += finished
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        now = time.monotonic()
        if self._bar is not None and now - self._drawn >= REFRESH_SECONDS:
            self._draw(now)

    def _draw(self, now: float) -> None:
        assert self._bar is not None
        self._drawn = now
        seconds = max(now - self._began, 1e-9)
        rates = f"in {self._prompt_tokens / seconds:,.1f} tok/s, out {self._output_tokens / seconds:,.1f} tok/s"
        self._bar.update(self._task, completed=self._done, rates=rates)
        self._bar.refresh()
