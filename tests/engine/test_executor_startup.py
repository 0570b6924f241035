"""Which device builds the engine, and what choosing it imports."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_model import save_tiny_model

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


@pytest.mark.parametrize("asked", [None, 1 << 20, 1 << 22])
def test_a_kv_cache_beyond_what_is_free_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: int | None
) -> None:
    """Memory that was promised and is not there is met only as the pages fill."""
    from ringserve.engine import cpu_startup

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_startup, "free_memory", lambda: 1 << 21)
    settings = ExecutorSettings(
        source=ModelSource(str(save_tiny_model(tmp_path / "model")), "directory", "m"),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=None,
        config=ExecutorConfig(device="cpu", kv_cache_memory=asked),
    )
    build_engine(settings, 1, 1, lambda stage, part: None).runner.close()
    assert ("--kv-cache-memory 4194304 is more than the 2097152 bytes" in caplog.text) == (asked == 1 << 22)
