"""The runner of a device with the real kernels, on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted_pytest import MODELS, all_files, run_interpreted

FILES = [name for name in all_files() if name not in MODELS]


def test_there_are_such_tests() -> None:
    assert {"test_both_runners.py", "test_device_runner.py", "test_ordering.py"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name: str) -> None:
    run_interpreted(name)
