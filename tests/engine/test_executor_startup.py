"""Which device builds the engine, and what choosing it imports."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine import executor_startup
from ringserve.engine.executor_startup import build_engine
from ringserve.engine.model_error import ModelError, UnsupportedDeviceError


def test_no_kernels_of_a_cpu_before_a_cpu_is_chosen() -> None:
    """numba and the CPU's kernels cost a second of a start on another device, which has no use for them."""
    program = (
        "import sys\n"
        "import ringserve.engine.executor_startup, ringserve.engine.devices, ringserve.engine.ready_engine\n"
        "print(sorted(n for n in sys.modules if n.startswith(('numba', 'llvmlite', 'transformers', 'cupy', 'triton'))\n"
        "      or n == 'ringserve.engine.cpu_startup'))\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("error", [UnsupportedDeviceError("no sinks"), ModelError("no memory")])
def test_what_a_gpu_cannot_serve_goes_to_the_cpu_unless_a_gpu_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: Any, error: ModelError
) -> None:
    from ringserve.engine import cpu_startup, torch_setup
    from ringserve.engine.gpu import startup

    def refuse(*_: Any) -> None:
        raise error

    built = object()
    prepared: list[int] = []
    monkeypatch.setattr(torch_setup, "set_threads", prepared.append)
    monkeypatch.setattr(executor_startup, "misfit", lambda facts: None)
    monkeypatch.setattr(startup, "build_gpu_engine", refuse)
    monkeypatch.setattr(cpu_startup, "build_cpu_engine", lambda *_: built)
    settings = ExecutorSettings(
        source=ModelSource("/nowhere", "directory", "m"),
        dtype="auto",
        max_model_len=None,
        max_num_seqs=1,
        max_num_batched_tokens=None,
        config=ExecutorConfig(device=device),
    )
    with caplog.at_level(logging.INFO, "ringserve.executor"):
        if device == "auto" and isinstance(error, UnsupportedDeviceError):
            assert build_engine(settings, 1, 1, lambda stage, part: None) is built
            assert caplog.messages == ["computing on the CPU: no sinks"]
        else:
            with pytest.raises(ModelError, match=str(error)):
                build_engine(settings, 1, 1, lambda stage, part: None)
    assert prepared == [1]
