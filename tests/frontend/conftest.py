"""One frontend on a real socket for the tests of a module that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from frontend_harness import RunningFrontend


@pytest.fixture(scope="module")
def frontend() -> Iterator[RunningFrontend]:
    with RunningFrontend() as running:
        yield running


@pytest.fixture(scope="module")
def http(frontend: RunningFrontend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=frontend.url, timeout=20) as client:
        yield client
