"""Starts of a CPU engine on a checkpoint, first and later ones, for the tests of what is kept between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from step_planner import GREEDY

from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine.cpu_startup import build_cpu_engine
from ringserve.engine.devices import CPU
from ringserve.engine.ready_engine import Engine
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.steps import NewSequence, SchedulerOutput


def make_settings(path: Path, **changes: Any) -> ExecutorSettings:
    """``changes``: settings; under ``config``, options of the executor."""
    config = {"block_size": 16, "threads": 1} | changes.pop("config", {})
    fields: dict[str, Any] = {
        "source": ModelSource(str(path), "directory", "model"),
        "dtype": "bfloat16",
        "max_model_len": None,
        "max_num_seqs": 4,
        "max_num_batched_tokens": None,
    } | changes
    return ExecutorSettings(config=ExecutorConfig(**config), **fields)


def settings_of(home: Path, **changes: Any) -> ExecutorSettings:
    """Of the model in ``home``."""
    return make_settings((home / "model").resolve(), **changes)


def start(settings: ExecutorSettings) -> Engine:
    """As the executor does on a CPU, with as many threads as the settings say."""
    return build_cpu_engine(settings, CPU, 1, settings.config.threads or 1, lambda stage, fraction: None)


def tokens_of(engine: Engine) -> list[int]:
    """A prompt and some steps after it."""
    new = NewSequence(0, pack_i32(range(5, 25)), 20, 0, 0, GREEDY, 9)
    one, none = pack_i32([1]), b""
    steps = [SchedulerOutput(1, (new,), pack_i32([0]), pack_i32([20]), pack_i32([2]), pack_i32([1, 2]), none)]
    steps += [SchedulerOutput(n, (), pack_i32([0]), one, pack_i32([0]), none, none) for n in range(2, 7)]
    found = []
    for step in steps:
        engine.runner.submit(step)
        found.append(unpack_i32(engine.runner.collect().token_ids).tolist())
    engine.runner.close()
    return [token for row in found for token in row]


def kept_file(home: Path, suffix: str) -> Path:
    """The only one with that suffix."""
    (path,) = (home / "cache" / "ringserve" / "weights").glob(f"*{suffix}")
    return path
