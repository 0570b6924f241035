"""The scheduler's and the executor's actors over a device's runner and over the CPU's: the same messages come out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from context_model import Patterns
from device_runners import VOCAB_SIZE, cpu_runner, device_runner, small_ready
from engine_core import Box, EngineCore, Generated, greedy

from ringserve.actor import ActorContext
from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine.executor import Executor
from ringserve.engine.gpu.device import HostDevice
from ringserve.engine.runner import Runner
from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import ResumedChoice
from ringserve.messages.startup import ExecutorReady

PATTERNS = Patterns(VOCAB_SIZE)


class ExecutorWithoutModel:
    """As ``engine_core.LoadedExecutor``, without a model."""

    def __init__(self, runner: Runner, ready: ExecutorReady) -> None:
        self.to_scheduler = Box()
        self.ready = ready
        settings = ExecutorSettings(
            ModelSource("nowhere", "directory", "model"), "float32", None, ready.max_num_seqs, None, ExecutorConfig()
        )
        context = ActorContext("executor", settings, {"scheduler": self.to_scheduler}, lambda _: None, lambda: None)
        self.actor = Executor(context)
        self.actor._runner = runner


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()
    return ids


def run(runner: Runner, ready: ExecutorReady) -> tuple[dict[tuple[int, int], Generated], EngineCore]:
    core = EngineCore(ExecutorWithoutModel(runner, ready))
    seeded: dict[str, Any] = {"temperature": 1.1, "seed": 7, "ignore_eos": False, "presence_penalty": 0.4}
    requests = [greedy(i, prompt_of(2 + 5 * i, i), 6 + i) for i in range(6)]
    requests.append(msgspec.structs.replace(greedy(6, prompt_of(9, 6), 8, **seeded), n=3))
    resumed = (ResumedChoice(0, pack_i32([5, 6]), 0), ResumedChoice(1, pack_i32([7]), 0, finish_reason="stop"))
    requests.append(msgspec.structs.replace(greedy(7, prompt_of(4, 7), 8, **seeded), n=3, resumed=resumed))
    requests.append(greedy(8, prompt_of(12, 8), 0))
    return core.run(requests), core


@pytest.mark.parametrize("num_pages", [60, 22])
def test_the_same_comes_out(num_pages: int) -> None:
    ready = small_ready(num_pages=num_pages, max_num_seqs=4)
    expected, _ = run(cpu_runner(ready, PATTERNS), ready)
    got, core = run(device_runner(ready, PATTERNS, HostDevice()), ready)
    assert {key: (each.token_ids, each.reason) for key, each in got.items()} == {
        key: (each.token_ids, each.reason) for key, each in expected.items()
    }
    for i in range(6):
        assert got[i, 0].token_ids == PATTERNS.greedy(prompt_of(2 + 5 * i, i), 6 + i)
    # Step k + 1 had been planned and sent when step k was answered.
    ahead = sum(later.scheduled_ns < earlier.executor_finished_ns for earlier, later in pairwise(core.times))
    assert ahead > len(core.times) // 2
    assert all(times.executor_started_ns <= times.executor_finished_ns for times in core.times)
    ordered = [(times.executor_started_ns, times.executor_finished_ns) for times in core.times]
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(ordered))
