"""No wake-up is lost where two processors meet within nanoseconds, and the fences are why.

Nothing here waits: both sides meet after each race, and a sleeper that nobody rang is counted. Twice 10^7 arms are a
kept run (tests/support/wakeup_race.py as a command).
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from wakeup_race import Handshake, build_race, run_race, two_processors

ARMS = 100_000


@pytest.fixture
def cpus() -> tuple[int, int]:
    found = two_processors()
    if found is None:
        pytest.skip("needs two processors: on one, stores are never delayed past the loads of another")
    return found


@pytest.mark.parametrize("handshake", get_args(Handshake))
def test_no_wake_up_is_lost(tmp_path: Path, handshake: Handshake, cpus: tuple[int, int]) -> None:
    counts = run_race(build_race(tmp_path, fences=True), handshake, ARMS, 1, cpus)
    assert counts["slept"] + counts["refused"] == ARMS
    assert counts["lost"] == 0
    assert min(counts["slept"], counts["refused"]) > ARMS // 1000, "the two sides hardly ever met: no race"


@pytest.mark.parametrize("handshake", get_args(Handshake))
def test_without_fences_the_same_race_loses_wake_ups(
    tmp_path: Path, handshake: Handshake, cpus: tuple[int, int]
) -> None:
    """Else the test above would show nothing."""
    module = build_race(tmp_path, fences=False)
    assert any(run_race(module, handshake, ARMS // 10, seed, cpus)["lost"] for seed in range(1, 101))
