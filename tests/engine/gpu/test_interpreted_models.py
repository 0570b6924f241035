"""Models on a device with the real kernels, their loading and start-up, on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted_pytest import MODELS, all_files, run_interpreted


def test_there_are_such_tests() -> None:
    assert set(MODELS) <= set(all_files())


@pytest.mark.parametrize("name", MODELS)
def test_in_the_interpreter(name: str) -> None:
    run_interpreted(name)
