"""A GPU's start-up on the host: settings in, a runner that answers as the model does out; or one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import SERVED, make_checkpoint
from device_models import LENGTHS, STEPS, tiny

from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine.array_namespace import ArrayNamespace, NumpyNamespace
from ringserve.engine.devices import GPU
from ringserve.engine.gpu import startup
from ringserve.engine.gpu.decoder_weights import rotary_tables
from ringserve.engine.gpu.device import HostDevice
from ringserve.engine.gpu.device_check import compute_logits
from ringserve.engine.gpu.device_runner import DeviceRunner
from ringserve.engine.gpu.startup import build_gpu_engine
from ringserve.engine.model_error import ModelError, UnsupportedDeviceError
from ringserve.engine.model_loader import load_model
from ringserve.engine.ready_engine import Engine
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import NewSequence, SchedulerOutput

SMALL = {
    "decoder": tiny("qwen2-sliding", max_window_layers=1),
    "other": tiny("gemma2", num_hidden_layers=1),
    "one-layer": tiny("mistral", num_hidden_layers=1),
    "sinks": SERVED["gpt-oss"],
}
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("startup")


def checkpoint(directory: Path, name: str) -> Path:
    path = directory / name
    return path if path.exists() else make_checkpoint(path, *SMALL[name])


@pytest.fixture
def short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real one every start takes seconds more; one test has it."""
    monkeypatch.setattr(startup, "LENGTHS", LENGTHS)
    monkeypatch.setattr(startup, "compute_logits", partial(compute_logits, steps=STEPS))


@pytest.fixture
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRunner, "warm_up", lambda self, on_progress: None)


@pytest.fixture
def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "check_other_path", lambda *arguments: None)


def start(
    path: Path, device: HostDevice | None = None, max_model_len: int | None = 32, seen: Any = None, **config: Any
) -> Engine:
    settings = ExecutorSettings(
        source=ModelSource(str(path), "directory", "m"),
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        config=ExecutorConfig(**{"kv_cache_memory": 1 << 20, **config}),
    )

    def progress(stage: str, fraction: float) -> None:
        if seen is not None and stage not in seen:
            seen.append(stage)

    return build_gpu_engine(settings, GPU, device if device is not None else HostDevice(), 1, progress)


def greedy(engine: Engine, count: int) -> list[int]:
    """Through the runner: the prompt in chunks, then decodes."""
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    new = NewSequence(1, pack_i32(PROMPT), len(PROMPT), 0, 0, SamplingParams(seed=0, temperature=0.0), count)
    tokens: list[int] = []
    chunks = [8, len(PROMPT) - 8] + [1] * (count - 1)
    for step, chunk in enumerate(chunks):
        first = step == 0
        output = SchedulerOutput(
            step,
            (new,) if first else (),
            pack_i32([1]),
            pack_i32([chunk]),
            pack_i32([2 if first else 0]),
            pack_i32([5, 2]) if first else b"",
            b"",
        )
        tokens += unpack_i32(runner.execute(output).token_ids)
    return tokens


def own_greedy(path: Path, count: int) -> list[int]:
    model: Any = load_model(ModelSource(str(path), "directory", "m"), "float32", lambda stage, part: None).model
    model.config._attn_implementation = "eager"
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_a_decoder(directory: Path) -> None:
    path, seen = checkpoint(directory, "decoder"), list[str]()
    engine = start(path, seen=seen)
    try:
        assert greedy(engine, 3) == own_greedy(path, 3)
    finally:
        engine.runner.close()
    ready = engine.ready(1.0)
    assert (ready.device, ready.model_impl, ready.dtype, ready.kv_dtype) == ("cuda", "fast", "float32", "float32")
    assert (ready.page_size, ready.max_model_len, ready.max_num_batched_tokens) == (16, 32, 8)
    assert ready.num_pages == (1 << 20) // (2 * 2 * 2 * 16 * 16 * 4)
    assert seen == ["loading weights", "checking the model", startup.WARMING_UP, startup.CAPTURING]


@pytest.mark.usefixtures("short_check")
def test_transformers_code(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint(directory, "other")
    with caplog.at_level(logging.INFO, "ringserve.executor"):
        engine = start(path)
    try:
        assert greedy(engine, 2) == own_greedy(path, 2)
    finally:
        engine.runner.close()
    assert engine.model_impl == "transformers"
    assert engine.runner.num_graphs == 0  # type: ignore[attr-defined]
    assert "not on the fast path" in caplog.text
    assert "without CUDA graphs" in caplog.text
    with pytest.raises(ModelError, match="the fast path does not serve Gemma2ForCausalLM"):
        start(path, model_impl="fast")


@pytest.mark.usefixtures("short_check", "no_warm_up")
def test_eight_bits_everywhere(directory: Path) -> None:
    engine = start(checkpoint(directory, "one-layer"), quantization="int8", kv_cache_dtype="fp8", enforce_eager=True)
    try:
        assert len(greedy(engine, 2)) == 2
        assert engine.runner.num_graphs == 0  # type: ignore[attr-defined]
    finally:
        engine.runner.close()
    assert (engine.plan.quantization, engine.plan.kv_dtype, engine.model_impl) == ("int8", "float8", "fast")


def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compact forward turns by other angles than the model."""

    def wrong(*arguments: Any) -> Any:
        cos, sin = rotary_tables(*arguments)
        return sin, cos

    monkeypatch.setattr(startup, "rotary_tables", wrong)


@pytest.mark.usefixtures("short_check", "no_warm_up")
def test_a_compact_forward_that_is_wrong_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(monkeypatch)
    path = checkpoint(directory, "one-layer")
    with caplog.at_level(logging.INFO, "ringserve.executor"):
        engine = start(path)
    engine.runner.close()
    assert engine.model_impl == "transformers"
    assert "its logits differ from the model's own" in caplog.text
    with pytest.raises(UnsupportedDeviceError, match=r"--quantization fp8: its logits differ .*; leave it out"):
        start(path, quantization="fp8")


def test_what_the_gpus_kernels_do_not_take(directory: Path) -> None:
    with pytest.raises(UnsupportedDeviceError, match=r"sinks.*--device cpu"):
        start(checkpoint(directory, "sinks"))


class SmallDevice(HostDevice):
    """``total`` bytes, of which ``free`` are free, and as much for pages as ``pages``."""

    def __init__(self, total: int, free: int, pages: int) -> None:
        self._total, self._free, self._pages = total, free, pages

    @property
    def namespace(self) -> ArrayNamespace:
        return SmallNamespace(self._pages)

    def free_bytes(self) -> int:
        return self._free

    def total_bytes(self) -> int:
        return self._total


class SmallNamespace(NumpyNamespace):
    def __init__(self, most: int) -> None:
        self._most = most

    def allocate(self, num_elements: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        if num_elements * dtype.itemsize > self._most:
            raise MemoryError("out of memory")
        return super().allocate(num_elements, dtype)


MEGABYTE = 1 << 20


@pytest.mark.usefixtures("no_check", "no_warm_up")
def test_a_swap_space_that_the_host_has_not(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The default is given up, one that was asked for is an error."""
    device = SmallDevice(1 << 30, 1 << 30, 4 * MEGABYTE)
    engine = start(checkpoint(directory, "one-layer"), device)
    engine.runner.close()
    assert engine.swap.num_host_pages == 0
    assert "preempted sequences are not swapped: --swap-space" in caplog.text
    with pytest.raises(ModelError, match="--swap-space 8388608 does not fit"):
        start(checkpoint(directory, "one-layer"), device, swap_space=8 * MEGABYTE)
    assert start(checkpoint(directory, "one-layer"), device, swap_space=MEGABYTE).swap.num_host_pages > 0


@pytest.mark.usefixtures("no_check", "no_warm_up")
def test_the_pool_gets_what_is_left(directory: Path) -> None:
    path = checkpoint(directory, "one-layer")
    device = SmallDevice(10 * MEGABYTE, 6 * MEGABYTE, 100 * MEGABYTE)
    engine = start(path, device, kv_cache_memory=None, gpu_memory_utilization=0.5, swap_space=0)
    engine.runner.close()
    page = 2 * 2 * 16 * 16 * 4
    left = 5 * MEGABYTE - 4 * MEGABYTE
    assert left - 6 * page < engine.budget.num_pages * page <= left - page


@pytest.mark.usefixtures("no_check", "no_warm_up")
@pytest.mark.parametrize(
    ("device", "config", "line"),
    [
        (
            SmallDevice(10 * MEGABYTE, MEGABYTE, 100 * MEGABYTE),
            {"kv_cache_memory": None},
            "no GPU memory is left .* --gpu-memory-utilization above 0.9",
        ),
        (HostDevice(), {"kv_cache_memory": 4096}, "one sequence of max_model_len 32 needs"),
        (
            SmallDevice(1 << 30, 1 << 30, MEGABYTE),
            {"kv_cache_memory": 2 * MEGABYTE},
            "KV pages do not fit into the GPU's memory .*--kv-cache-memory",
        ),
        (HostDevice(), {"block_size": 12}, "not a power of two"),
    ],
)
def test_memory_that_is_not_there(directory: Path, device: HostDevice, config: dict[str, Any], line: str) -> None:
    with pytest.raises(ModelError, match=line):
        start(checkpoint(directory, "one-layer"), device, **config)


@pytest.mark.usefixtures("no_check")
def test_a_largest_step_that_does_not_fit(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: DeviceRunner, on_progress: Callable[[float], None]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DeviceRunner, "warm_up", full)
    with pytest.raises(ModelError, match=r"steps of 8 tokens do not fit .* smaller --max-num-batched-tokens"):
        start(checkpoint(directory, "one-layer"))
