"""What the tests of the tokenizer process's actor do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tokenizer_world import Row, World, token_outputs

from ringserve.messages.prompts import Prompt, TextPrompt
from ringserve.messages.requests import GenerateRequest, OutputParams, RequestRefused, ResumedChoice
from ringserve.messages.sampling import SamplingParams

SECOND = 1 << 48
"""Request ids of the second frontend begin here."""
GREETING = TextPrompt("Hello")
LONG = "the quick brown fox jumps over the lazy dog. " * 700
"""Encoded in a thread."""


def generate(
    world: World,
    prompt: Prompt = GREETING,
    request_id: int = 1,
    *,
    stop: tuple[str, ...] = (),
    include: bool = False,
    skip_special: bool = True,
    echo: bool = False,
    min_tokens: int = 0,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    n: int = 1,
    max_tokens: int | None = 100,
    resumed: tuple[ResumedChoice, ...] = (),
) -> None:
    world.actor.handle(
        GenerateRequest(
            request_id,
            prompt,
            SamplingParams(1, min_tokens=min_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
            OutputParams(stop, include, skip_special, echo),
            n,
            max_tokens,
            resumed=resumed,
            received_ns=10,
        ),
        f"frontend-{request_id >> 48}",
    )


def ids_of(world: World, text: str) -> list[int]:
    """Of a text alone, without special tokens."""
    return world.actor._encoder._encode_text(text, False)


def feed(world: World, *rows: Row, **columns: Any) -> None:
    """The scheduler's news of one step."""
    world.actor.handle(token_outputs(rows, **columns), "scheduler")


def refusal(world: World) -> RequestRefused:
    """The only message to the first frontend; the scheduler got none."""
    (message,) = world.frontend.take()
    assert isinstance(message, RequestRefused)
    assert not world.scheduler
    return message


def run_until_quiet(world: World, act: Callable[[], None]) -> int:
    """Call ``act`` on a loop and run it until nothing waits for a thread; the number of loop turns that took."""

    async def live() -> int:
        act()
        turns = 0
        while world.actor._lanes._lanes or world.actor._question_lanes._lanes:
            turns += 1
            await asyncio.sleep(0)
        return turns

    return asyncio.run(live())
