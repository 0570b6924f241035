"""Tokenizer, scheduler and executor actors in one process: prompts in, text out, without HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from engine_core import Box, LoadedExecutor

from ringserve.actor import ActorContext
from ringserve.config import ModelSource, SchedulerConfig, SchedulerSettings, TokenizerSettings
from ringserve.engine.scheduler_loop import SchedulerActor
from ringserve.engine.tokenizer import create
from ringserve.messages.columns import unpack_i32, unpack_u64
from ringserve.messages.logprobs import TokenLogprob
from ringserve.messages.requests import GenerateRequest, RequestRefused
from ringserve.messages.text_outputs import TextFinish, TextOutputs


@dataclass
class Answer:
    """What a client would have got of one choice, step by step."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_ids_by_step: list[list[int]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: TextFinish | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class TextEngine:
    """The three actors behind a frontend's two messages, GenerateRequest and TextOutputs."""

    def __init__(self, executor: LoadedExecutor, source: ModelSource) -> None:
        self._executor = executor
        self._source = source
        self.refused: list[RequestRefused] = []

    def run(self, *requests: GenerateRequest) -> dict[tuple[int, int], Answer]:
        """Answer ``requests``, all sent at once."""
        return asyncio.run(self._run(requests))

    async def _run(self, requests: tuple[GenerateRequest, ...]) -> dict[tuple[int, int], Answer]:
        frontend, to_scheduler, to_tokenizer, steps = Box(), Box(), Box(), Box()
        tokenizer = create(
            ActorContext(
                "tokenizer-0",
                TokenizerSettings(self._source, None, None),
                {"frontend-0": frontend, "scheduler": to_scheduler},
                lambda _message: None,
                lambda: None,
            )
        )
        scheduler = SchedulerActor(
            ActorContext(
                "scheduler",
                SchedulerSettings(SchedulerConfig()),
                {"executor": steps, "tokenizer-0": to_tokenizer},
                lambda _message: None,
                lambda: None,
            )
        )
        life = asyncio.ensure_future(tokenizer.run())
        await asyncio.sleep(0)
        scheduler.handle(self._executor.ready, "executor")
        tokenizer.handle(to_tokenizer.messages.popleft(), "scheduler")
        answers = {(r.request_id, choice): Answer() for r in requests for choice in range(r.n)}
        for request in requests:
            for resumed in request.resumed:
                if resumed.finish_reason is not None:
                    del answers[request.request_id, resumed.choice]
            tokenizer.handle(request, "frontend-0")
        self.refused.clear()
        while any(answer.finish is None for answer in answers.values()) and not self.refused:
            await asyncio.sleep(0)  # completions of the worker thread
            _pass_on(to_scheduler, scheduler, "tokenizer-0")
            scheduler.act()
            _pass_on(steps, self._executor.actor, "scheduler")
            self._executor.actor.act()
            _pass_on(self._executor.to_scheduler, scheduler, "executor")
            _pass_on(to_tokenizer, tokenizer, "scheduler")
            self._collect(frontend, answers)
        while scheduler_work := _drain(scheduler, steps, self._executor):
            assert scheduler_work
        tokenizer.request_stop()
        await life
        return answers

    def _collect(self, frontend: Box, answers: dict[tuple[int, int], Answer]) -> None:
        while frontend.messages:
            match frontend.messages.popleft():
                case TextOutputs() as outputs:
                    _collect_rows(outputs, answers)
                case RequestRefused() as refused:
                    self.refused.append(refused)


def _pass_on(box: Box, actor: Any, source: str) -> None:
    while box.messages:
        actor.handle(box.messages.popleft(), source)


def _drain(scheduler: SchedulerActor, steps: Box, executor: LoadedExecutor) -> bool:
    """Steps planned past the end: the executor must be left as the scheduler believes it to be."""
    scheduler.act()
    _pass_on(steps, executor.actor, "scheduler")
    executor.actor.act()
    worked = bool(executor.to_scheduler.messages)
    _pass_on(executor.to_scheduler, scheduler, "executor")
    return worked


def _collect_rows(outputs: TextOutputs, answers: dict[tuple[int, int], Answer]) -> None:
    keys = list(zip(unpack_u64(outputs.request_ids), unpack_i32(outputs.choices), strict=True))
    ids, position = unpack_i32(outputs.token_ids), 0
    for key, text, count in zip(keys, outputs.texts, unpack_i32(outputs.token_counts), strict=True):
        answer = answers[key]
        assert answer.finish is None, f"{key} goes on after its end"
        step_ids = ids[position : position + count].tolist()
        position += count
        answer.texts.append(text)
        answer.token_ids += step_ids
        answer.token_ids_by_step.append(step_ids)
    for logprobs in outputs.logprobs:
        answers[keys[logprobs.row]].logprobs += logprobs.tokens
    for finish in outputs.finishes:
        answers[keys[finish.row]].finish = finish
