"""One tokenizer process's actor for the tests of a module that leave it as it was."""

from __future__ import annotations

import pytest
from tokenizer_world import World, default_gguf, make_world, ready, settings_for


@pytest.fixture(scope="module")
def shared_world() -> World:
    return make_world(settings_for(default_gguf()), ready())


@pytest.fixture
def world(shared_world: World) -> World:
    """The default model's tokenizer with 8,192 tokens of context and nothing open."""
    assert not shared_world.actor._requests
    shared_world.actor.handle(ready(), "scheduler")
    for role in ("frontend-0", "frontend-1", "scheduler"):
        shared_world[role].clear()
    return shared_world
