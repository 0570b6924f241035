"""Which device is taken."""

from __future__ import annotations

import logging

import pytest

from ringserve.engine.devices import CPU, GPU, choose_device
from ringserve.engine.model_error import ModelError


def never() -> str | None:
    raise AssertionError("a CPU was asked for")


def test_the_device_that_was_asked_for() -> None:
    assert choose_device("cpu", never) == CPU
    assert choose_device("cuda", lambda: None) == GPU
    assert choose_device("auto", lambda: None) == GPU
    with pytest.raises(ModelError, match=r"^--device cuda: CuPy is not installed$"):
        choose_device("cuda", lambda: "CuPy is not installed")


def test_auto_says_why_it_takes_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ringserve.executor"):
        assert choose_device("auto", lambda: "CuPy is not installed") == CPU
    assert caplog.messages == ["computing on the CPU: CuPy is not installed"]
