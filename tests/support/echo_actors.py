"""Small actors for tests of the skeleton: an "executor" that answers each step with a LoadProgress naming it."""

from __future__ import annotations

import asyncio
from typing import Any

from ringserve.actor import ActorContext, AsyncActor, BlockingActor
from ringserve.messages.startup import LoadProgress, Started
from ringserve.messages.steps import SchedulerOutput

FAULTY_STEP = 10**9


class Echo:
    """Blocking: answers in ``act``, one step a turn, and says that there is more while there is."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._steps: list[int] = []

    def startup(self) -> None:
        self._context.report(Started({"echo": 1}))

    def handle(self, message: Any, source: str) -> None:
        assert source == "scheduler"
        assert isinstance(message, SchedulerOutput)
        if message.step_id == FAULTY_STEP:
            raise ValueError("a planted fault")
        self._steps.append(message.step_id)

    def act(self) -> bool:
        if self._steps:
            self._context.outboxes["scheduler"].send(LoadProgress(str(self._steps.pop(0)), 0.0))
        return bool(self._steps)

    def shutdown(self) -> None:
        self._context.outboxes["scheduler"].send(LoadProgress("goodbye", 1.0))


class AsyncEcho:
    """On uvloop: answers from a task, outside ``handle`` and ``act``."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._steps: asyncio.Queue[int | None] = asyncio.Queue()

    async def run(self) -> None:
        self._context.report(Started({"echo": 2}))
        while (step := await self._steps.get()) is not None:
            self._context.outboxes["scheduler"].send(LoadProgress(str(step), 0.0))
            self._context.flush_soon()
        self._context.outboxes["scheduler"].send(LoadProgress("goodbye", 1.0))

    def handle(self, message: Any, source: str) -> None:
        assert source == "scheduler"
        if message.step_id == FAULTY_STEP:
            raise ValueError("a planted fault")
        self._steps.put_nowait(message.step_id)

    def act(self) -> None:
        """Nothing is batched."""

    def request_stop(self) -> None:
        self._steps.put_nowait(None)

    def peer_died(self, name: str) -> None:
        """Nobody waits for an answer."""


def create(context: ActorContext) -> BlockingActor | AsyncActor:
    """``settings`` is True for the async one."""
    return AsyncEcho(context) if context.settings else Echo(context)
