"""The executor as an actor: what it reports while it starts, how it refuses, how it runs steps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from checkpoints import REFUSED, SERVED, make_checkpoint
from fast_models import FAMILY
from step_planner import GREEDY

from ringserve.actor import ActorContext
from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine import cpu_startup
from ringserve.engine.executor import THREAD_ENVIRONMENT, Executor, create
from ringserve.engine.model_error import ModelError
from ringserve.engine.start_stages import COMPILING
from ringserve.engine.user_cache import user_cache
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.startup import ExecutorReady, LoadProgress, Progress, Started, StartFailed
from ringserve.messages.steps import ModelRunnerOutput, NewSequence, SchedulerOutput

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor instructs its libraries through its own process's environment, which here is everybody's."""
    for name in (*THREAD_ENVIRONMENT, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@dataclass
class Neighbours:
    """Records what the executor says."""

    sent: list[Any] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.sent.append(message)


def executor(path: Path, neighbours: Neighbours, **changes: Any) -> Executor:
    config = ExecutorConfig(
        threads=changes.pop("threads", 1),
        block_size=changes.pop("block_size", 8),
        kv_cache_memory=changes.pop("kv_cache_memory", None),
        swap_space=changes.pop("swap_space", None),
        model_impl=changes.pop("model_impl", "auto"),
        quantization=changes.pop("quantization", "none"),
        kv_cache_dtype=changes.pop("kv_cache_dtype", "auto"),
    )
    settings = ExecutorSettings(
        source=ModelSource(str(path), "directory", "model"),
        dtype=changes.pop("dtype", "float32"),
        max_model_len=changes.pop("max_model_len", None),
        max_num_seqs=4,
        max_num_batched_tokens=changes.pop("max_num_batched_tokens", None),
        config=config,
    )
    assert not changes
    context = ActorContext("executor", settings, {"scheduler": neighbours}, neighbours.reports.append, lambda: None)
    actor = create(context)
    assert isinstance(actor, Executor)
    return actor


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("executor") / "llama", *SERVED["llama"])


def test_start(llama: Path) -> None:
    neighbours = Neighbours()
    executor(llama, neighbours).startup()
    ready = neighbours.sent[-1]
    assert isinstance(ready, ExecutorReady)
    assert ready.load_seconds > 0
    assert (ready.vocab_size, ready.max_model_len, unpack_i32(ready.eos_token_ids).tolist()) == (199, 256, [2])
    assert (ready.page_size, ready.num_pages) == (8, 4 * 256 // 8)
    assert (ready.max_num_seqs, ready.max_num_batched_tokens, ready.num_threads) == (4, 256, 1)
    assert (ready.dtype, ready.kv_dtype, ready.device) == ("float32", "float32", "cpu")
    assert (ready.num_host_pages, ready.bytes_per_page, ready.swap_bytes_per_second) == (0, 0, 0.0)
    assert ready.architecture == "LlamaForCausalLM"
    *progress, started = neighbours.reports
    assert isinstance(started, Started)
    assert started.summary == {
        "dtype": "float32",
        "kv_dtype": "float32",
        "model_impl": "transformers",
        "quantization": "none",
        "instructions": "",
        "device": "cpu",
        "threads": 1,
        "kv_tokens": 1024,
        "architecture": "LlamaForCausalLM",
        "load_seconds": round(ready.load_seconds, 2),
    }
    told = [(message.stage, message.fraction) for message in progress if isinstance(message, Progress)]
    assert [(m.stage, m.fraction) for m in neighbours.sent[:-1] if isinstance(m, LoadProgress)] == told
    # Kernels are compiled at the first start only.
    stages = list(dict.fromkeys(stage for stage, _ in told if stage != COMPILING))
    assert stages == ["starting", "loading weights", "checking the model", "warming up"]
    assert all(0.0 <= fraction <= 1.0 for _, fraction in told)
    assert not torch.is_grad_enabled()


@pytest.fixture(autouse=True)
def gradients() -> Any:
    """The executor switches them off for its process."""
    yield
    torch.set_grad_enabled(True)


def failure(path: Path, **changes: Any) -> str:
    neighbours = Neighbours()
    with pytest.raises(SystemExit) as end:
        executor(path, neighbours, **changes).startup()
    assert end.value.code == 1
    failed = neighbours.reports[-1]
    assert isinstance(failed, StartFailed)
    assert not any(isinstance(message, ExecutorReady) for message in neighbours.sent)
    assert "\n" not in failed.message
    return failed.message


def test_what_cannot_start_says_why_and_exits(llama: Path, tmp_path: Path) -> None:
    assert "does not exist" in failure(tmp_path / "missing")
    assert "at most 256" in failure(llama, max_model_len=257)
    assert "power of two" in failure(llama, block_size=48)
    assert f"--threads 9999 is more than the {len(os.sched_getaffinity(0))} processors" in failure(llama, threads=9999)
    assert "power of two" in failure(llama, block_size=256)
    assert failure(llama, kv_cache_dtype="fp8") == (
        "--kv-cache-dtype fp8 is for GPUs; use int8 on this CPU, or leave it out"
    )
    config_class, arguments, reason = REFUSED["bloom"]
    assert reason in failure(make_checkpoint(tmp_path / "bloom", config_class, arguments))


def test_threads_beyond_the_processors_that_are_left(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container, or taskset: what the machine has does not count."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5})
    assert "--threads 2 is more than the 1 processors" in failure(llama, threads=2)


def test_without_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id that the system does not know, as containers have them: weights are packed at every start."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    path = make_checkpoint(tmp_path / "small", *FAMILY["llama"])
    for model_impl in ("auto", "transformers"):
        neighbours = Neighbours()
        actor = executor(path, neighbours, dtype="bfloat16", block_size=16, model_impl=model_impl)
        actor.startup()
        assert isinstance(neighbours.sent[-1], ExecutorReady)
        actor.shutdown()
    with pytest.raises(ModelError, match="set HOME or XDG_CACHE_HOME"):
        user_cache()


def test_steps_larger_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is larger than what all sequences together can fill; one that does not fit is said in one line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_checkpoint(tmp_path / "small", *FAMILY["llama"])
    wanted = {"dtype": "bfloat16", "block_size": 16, "max_num_batched_tokens": 1 << 50}
    neighbours = Neighbours()
    actor = executor(path, neighbours, **wanted)
    actor.startup()
    assert neighbours.sent[-1].max_num_batched_tokens == 1 << 50
    actor.shutdown()

    def too_large(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("ringserve.engine.cpu_startup.FastForward", too_large)
    assert "--max-num-batched-tokens" in failure(path, **wanted)


def test_a_pool_smaller_than_the_longest_sequence(llama: Path) -> None:
    """Asked for: an error with both numbers. Not asked for: a shorter longest sequence."""
    page = 4 * 2 * (16 + 16) * 8 * 4
    message = failure(llama, kv_cache_memory=5 * page, max_model_len=200)
    assert "40 tokens" in message
    assert "200" in message
    assert "--kv-cache-memory" in message
    neighbours = Neighbours()
    executor(llama, neighbours, kv_cache_memory=5 * page + 17).startup()
    ready = neighbours.sent[-1]
    assert (ready.num_pages, ready.max_model_len) == (5, 40)
    assert "--kv-cache-memory" in failure(llama, kv_cache_memory=page - 1)


def one_step(step_id: int, new: Sequence[NewSequence], num_tokens: int, pages: Sequence[int]) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        new_sequences=tuple(new),
        slots=pack_i32([0]),
        num_tokens=pack_i32([num_tokens]),
        new_page_counts=pack_i32([len(pages)]),
        new_pages=pack_i32(pages),
        freed_slots=b"",
    )


def test_one_step_a_turn_in_the_order_they_came(llama: Path) -> None:
    neighbours = Neighbours()
    actor = executor(llama, neighbours)
    actor.startup()
    assert actor.act() is False
    neighbours.sent.clear()
    new = NewSequence(0, pack_i32([5, 6, 7]), 3, 0, 0, GREEDY, 9)
    actor.handle(one_step(1, [new], 3, [1]), "scheduler")
    actor.handle(one_step(2, [], 1, []), "scheduler")  # planned before the first one's result was read
    assert neighbours.sent == []
    assert actor.act() is True
    assert actor.act() is False
    first, second = neighbours.sent
    assert isinstance(first, ModelRunnerOutput)
    assert (first.step_id, second.step_id) == (1, 2)
    assert first.received_ns <= first.started_ns <= first.sent_ns <= second.started_ns
    assert second.received_ns <= first.started_ns
    actor.shutdown()
    assert actor.act() is False


def test_a_step_that_fails_ends_the_process(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    neighbours = Neighbours()
    actor = executor(llama, neighbours)
    actor.startup()
    neighbours.sent.clear()
    actor.handle(one_step(7, [], 1, []), "scheduler")
    with pytest.raises(RuntimeError, match="nobody"):
        actor.act()
    assert neighbours.sent == []
    assert "step 7 failed" in caplog.text


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_fast_path_is_taken_where_it_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Literal["none", "int8"]
) -> None:
    """The second start finds the packed weights; both give the same tokens; the helper threads end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_checkpoint(tmp_path / "small", *FAMILY["llama"])
    tokens = []
    for stage, threads in (
        ("packing weights" if quantization == "none" else "quantising weights to int8", 1),
        ("reading packed weights", 2),
    ):
        neighbours = Neighbours()
        actor = executor(path, neighbours, dtype="bfloat16", block_size=16, threads=threads, quantization=quantization)
        actor.startup()
        ready = neighbours.sent[-1]
        assert (ready.model_impl, ready.quantization, ready.num_threads) == ("fast", quantization, threads)
        assert ready.instructions in ("avx512", "portable")
        assert stage in [message.stage for message in neighbours.reports if isinstance(message, Progress)]
        new = NewSequence(0, pack_i32(range(5, 25)), 20, 0, 0, GREEDY, 9)
        actor.handle(one_step(1, [new], 20, [1, 2]), "scheduler")
        actor.handle(one_step(2, [], 1, []), "scheduler")
        actor.act()
        actor.act()
        outputs = [message for message in neighbours.sent if isinstance(message, ModelRunnerOutput)]
        tokens.append([unpack_i32(output.token_ids).tolist() for output in outputs])
        actor.shutdown()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("compute-")]
    assert tokens[0] == tokens[1]
    assert [len(row) for row in tokens[0]] == [1, 1]


def test_the_fast_path_can_be_asked_for_or_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    message = failure(llama, model_impl="fast", dtype="bfloat16", block_size=16)
    assert message.startswith("the fast path does not serve LlamaForCausalLM: it has head dimension 16")
    path = make_checkpoint(tmp_path / "small", *FAMILY["llama"])
    neighbours = Neighbours()
    executor(path, neighbours, dtype="bfloat16", block_size=16, model_impl="transformers").startup()
    assert neighbours.sent[-1].model_impl == "transformers"
    with caplog.at_level("INFO"):
        executor(llama, Neighbours(), dtype="bfloat16", block_size=16).startup()
    assert "not on the fast path: it has head dimension 16" in caplog.text


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_threads_of_the_transformers_path(tmp_path: Path, quantization: Literal["none", "int8"]) -> None:
    """One or two give the same tokens, and none is left at the end."""
    path = make_checkpoint(tmp_path / "small", *FAMILY["llama"])
    tokens = []
    for threads in (1, 2):
        neighbours = Neighbours()
        asked = {"model_impl": "transformers", "threads": threads, "quantization": quantization}
        actor = executor(path, neighbours, dtype="bfloat16", block_size=16, **asked)
        actor.startup()
        assert neighbours.sent[-1].model_impl == "transformers"
        new = NewSequence(0, pack_i32(range(5, 25)), 20, 0, 0, GREEDY, 9)
        actor.handle(one_step(1, [new], 20, [1, 2]), "scheduler")
        actor.handle(one_step(2, [], 1, []), "scheduler")
        actor.act()
        actor.act()
        outputs = [message for message in neighbours.sent if isinstance(message, ModelRunnerOutput)]
        tokens.append([unpack_i32(output.token_ids).tolist() for output in outputs])
        actor.shutdown()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("compute-")]
    assert tokens[0] == tokens[1]
    assert [len(row) for row in tokens[0]] == [1, 1]


def test_unknown_messages_are_errors(llama: Path) -> None:
    with pytest.raises(TypeError, match="LoadProgress"):
        executor(llama, Neighbours()).handle(LoadProgress("x", 0.0), "scheduler")


def test_importing_the_actor_does_not_import_torch() -> None:
    """The threads' environment must be set before torch is loaded."""
    code = "import sys, ringserve.engine.executor; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize("kv_pages", [32, 300])
def test_swap_space(llama: Path, kv_pages: int) -> None:
    """Measured with more KV pages than host pages, and with fewer."""
    neighbours = Neighbours()
    page = 4 * 2 * (16 + 16) * 8 * 4
    executor(llama, neighbours, swap_space=100 * page + 1, kv_cache_memory=kv_pages * page).startup()
    ready = neighbours.sent[-1]
    assert (ready.num_pages, ready.num_host_pages) == (kv_pages, 100)
    assert ready.bytes_per_page == page
    assert 1e6 < ready.swap_bytes_per_second < 1e13
    message = failure(llama, swap_space=page - 1)
    assert message == f"--swap-space {page - 1} holds no KV page ({page} bytes); set at least that, or 0 to do without"
    assert "does not fit into the host's memory" in failure(llama, swap_space=1 << 60)


def test_swap_space_and_kv_cache_come_from_the_same_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone would fit."""
    megabyte = 1 << 20
    monkeypatch.setattr(cpu_startup, "free_memory", lambda: 100 * megabyte)
    neighbours = Neighbours()
    executor(llama, neighbours, swap_space=39 * megabyte, kv_cache_memory=60 * megabyte).startup()
    assert neighbours.sent[-1].num_host_pages > 0
    message = failure(llama, swap_space=41 * megabyte, kv_cache_memory=60 * megabyte)
    assert message.startswith(f"--swap-space {41 * megabyte} does not fit into the host's memory")
