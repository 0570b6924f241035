"""Random races of abort, stop string, eos, length, error and refusal: exactly one final message for each choice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_world import Row, World, collect, default_gguf, make_world, ready, settings_for, token_outputs

from ringserve.messages.columns import pack_i32
from ringserve.messages.integrity import CheckIntegrity
from ringserve.messages.prompts import TextPrompt, TokenPrompt
from ringserve.messages.requests import (
    ALL_CHOICES,
    Abort,
    GenerateRequest,
    OutputParams,
    RequestRefused,
    TokenizedRequest,
)
from ringserve.messages.sampling import SamplingParams


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(settings_for(default_gguf()), ready())


class FakeScheduler:
    """Ends each choice once, for any reason, some time after it was asked to or of itself."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._open: set[tuple[int, int]] = set()
        self._ending: dict[tuple[int, int], str] = {}
        self._vocabulary = [token for word in ("a", "b", "ab", " a", "€", "𒐫") for token in self._ids(word)]

    def _ids(self, word: str) -> list[int]:
        return self._world.actor._encoder._encode_text(word, False)

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def read(self) -> None:
        """Take what the tokenizer process sent."""
        for message in self._world.scheduler.take():
            if isinstance(message, TokenizedRequest):
                if self._rng.random() < 0.1:
                    self._world.actor.handle(RequestRefused(message.request_id, 503, "full"), "scheduler")
                else:
                    self._open |= {(message.request_id, choice) for choice in range(message.n)}
            elif isinstance(message, Abort):
                for key in self._open:
                    if key[0] == message.request_id and message.choice in (key[1], ALL_CHOICES):
                        self._ending.setdefault(key, message.reason)

    def step(self) -> None:
        """One step's tokens for some choices; two messages may be under way before an Abort is read."""
        rows = []
        for key in sorted(self._open):
            if self._rng.random() < 0.3:
                continue
            reason = self._ending.pop(key, None)
            if reason is None and self._rng.random() < 0.1:
                reason = self._rng.choice(["stop", "length", "error", "abort"])
            tokens = [self._rng.choice(self._vocabulary) for _ in range(self._rng.randrange(4))]
            if reason is not None:
                self._open.remove(key)
                tokens = [*tokens, 2] if reason == "stop" and self._rng.random() < 0.5 else tokens
            rows.append(Row(key[0], tokens, key[1], self._rng.random() < 0.5, reason))
        self._world.actor.handle(token_outputs(rows), "scheduler")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_exactly_one_final_for_each_choice(world: World, seed: int) -> None:
    rng = random.Random(seed)
    scheduler = FakeScheduler(world, rng)
    actor = world.actor
    asked: dict[int, int] = {}
    for index in range(rng.randrange(1, 40)):
        action = rng.random()
        if action < 0.35:
            request_id = (index % 2 << 48) + index
            n = rng.randrange(1, 4)
            prompt = TokenPrompt(pack_i32([5])) if rng.random() < 0.5 else TextPrompt(rng.choice(["Hi", ""]))
            output = OutputParams(rng.choice([(), ("ab",), ("€", "ba"), ("a",)]), rng.random() < 0.5)
            sampling = SamplingParams(1, min_tokens=rng.choice([0, 0, 5]))
            asked[request_id] = n
            actor.handle(GenerateRequest(request_id, prompt, sampling, output, n), f"frontend-{request_id >> 48}")
        elif action < 0.55 and asked:
            request_id = rng.choice(list(asked))
            choice = rng.choice([ALL_CHOICES, 0, 1])
            actor.handle(Abort(request_id, choice), f"frontend-{request_id >> 48}")
        elif action < 0.75:
            scheduler.read()
        else:
            scheduler.step()
    scheduler.read()
    while scheduler.busy:
        scheduler.step()
        if rng.random() < 0.5:
            scheduler.read()
    ended: dict[int, set[int]] = {request_id: set() for request_id in asked}
    for role in ("frontend-0", "frontend-1"):
        messages = world[role].take()
        for (request_id, choice), received in collect(messages).items():  # asserts that nothing follows a final row
            assert f"frontend-{request_id >> 48}" == role
            assert len(received.finishes) == 1
            assert received.finishes[0].num_output_tokens == len(received.token_ids)
            ended[request_id].add(choice)
        for message in messages:
            if isinstance(message, RequestRefused):
                assert not ended[message.request_id]
                ended[message.request_id] = set(range(asked[message.request_id]))
    assert ended == {request_id: set(range(n)) for request_id, n in asked.items()}
    world.scheduler.clear()
    actor.handle(CheckIntegrity(1), "frontend-0")
    assert world.scheduler.take() == [CheckIntegrity(1, 0)]
