"""One server of the default model for all tests of this folder (bfloat16 where the processor has it)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server("--debug-endpoints", "--max-model-len", "4096") as running:
        yield running
        assert running.stop() == 0, running.output()
