"""The runner of a device, driven by the real scheduler: what the CPU's runner makes of the same logits."""

from __future__ import annotations

import numpy as np
import pytest
from context_model import Patterns
from device_runners import VOCAB_SIZE, cpu_runner, device_runner, small_ready
from engine_core import greedy
from runner_core import RunnerCore

PATTERNS = Patterns(VOCAB_SIZE)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_greedy(enforce_eager: bool) -> None:
    """Prompts in chunks beside others that decode, more requests than slots, two steps in flight."""
    ready = small_ready()
    core = RunnerCore(device_runner(ready, PATTERNS, enforce_eager=enforce_eager), ready)
    prompts = {i: prompt_of(length, i) for i, length in enumerate((1, 5, 31, 2, 17, 40, 3, 8))}
    core.run(greedy(i, prompt, 4 + i) for i, prompt in prompts.items())
    assert core.max_in_flight == 2
    for i, prompt in prompts.items():
        assert core.results[i, 0].token_ids == PATTERNS.greedy(prompt, 4 + i)
