"""How the executor submits and collects steps, with a runner that is told when it is ready."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from ringserve.actor import ActorContext
from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine.executor import Executor
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput


class ToldRunner:
    """Ready when it is told to be; collecting before that is waiting."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.done: list[str] = []
        self.ready = 0
        self.fails_at = -1
        self._steps: deque[int] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    def submit(self, output: SchedulerOutput, received_ns: int = 0) -> None:
        self.done.append(f"submit {output.step_id}")
        self._steps.append(output.step_id)

    def is_ready(self) -> bool:
        return self.ready > 0

    def collect(self) -> ModelRunnerOutput:
        self.done.append(f"collect {self._steps[0]}" if self.ready else f"wait for {self._steps[0]}")
        if self._steps[0] == self.fails_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.ready = max(0, self.ready - 1)
        return ModelRunnerOutput(self._steps.popleft(), b"", b"", None, (), 0, 0, 0)

    def close(self) -> None:
        self.done.append("close")


class Sent:
    def __init__(self) -> None:
        self.step_ids: list[int] = []

    def send(self, message: Any) -> None:
        self.step_ids.append(message.step_id)


def executor_of(runner: ToldRunner) -> tuple[Executor, Sent]:
    sent = Sent()
    settings = ExecutorSettings(
        ModelSource("nowhere", "directory", "model"), "float32", None, 4, None, ExecutorConfig()
    )
    executor = Executor(ActorContext("executor", settings, {"scheduler": sent}, lambda _: None, lambda: None))
    executor._runner = runner
    return executor, sent


def give(executor: Executor, *step_ids: int) -> None:
    for step_id in step_ids:
        executor.handle(SchedulerOutput(step_id, (), b"", b"", b"", b"", b""), "scheduler")


def test_the_next_step_is_launched_while_one_runs() -> None:
    runner = ToldRunner(2)
    executor, sent = executor_of(runner)
    give(executor, 1)
    assert executor.act() is True  # nobody waits for 1: another may come
    assert executor.act() is True
    assert runner.done == ["submit 1"]
    give(executor, 2)
    assert executor.act() is True  # two are under way: nothing can come before the first result
    assert runner.done == ["submit 1", "submit 2", "wait for 1"]
    assert sent.step_ids == [1]
    give(executor, 3)
    executor.act()
    assert runner.done[3:] == ["submit 3", "wait for 2"]
    assert executor.act() is True
    runner.ready = 1
    assert executor.act() is False
    assert sent.step_ids == [1, 2, 3]
    assert executor.act() is False
    executor.shutdown()
    assert runner.done[-1] == "close"


def test_no_more_are_submitted_than_the_runner_takes() -> None:
    for most in (1, 2, 3):
        runner = ToldRunner(most)
        executor, sent = executor_of(runner)
        give(executor, *range(5))
        while executor.act():
            runner.ready = int(not executor._steps)
        assert sent.step_ids == [0, 1, 2, 3, 4]
        under_way = most_under_way = 0
        for what in runner.done:
            under_way += 1 if what.startswith("submit") else -1
            most_under_way = max(most_under_way, under_way)
        assert most_under_way == most


def test_a_failure_of_the_device_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    """Reported where a step is collected, and said of that step."""
    runner = ToldRunner(2)
    runner.fails_at = 7
    executor, sent = executor_of(runner)
    give(executor, 7, 8)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        executor.act()
    assert sent.step_ids == []
    assert "step 7 failed; the executor ends" in caplog.text
