"""Keys and values in int8 behind the real scheduler, on both paths: pages that are shared, kept, lost and made anew.

A page that was found, or computed again, must hold what the sequence would have written itself: the tokens are those of
a run alone, without a prefix cache. And twice as many fit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import SERVED, VOCAB_SIZE, make_checkpoint
from engine_core import EngineCore, LoadedExecutor, greedy
from fast_models import FAMILY

from ringserve.config import ModelSource, SchedulerConfig
from ringserve.engine.kv_dtype import choose_kv_dtype
from ringserve.engine.model_error import ModelError
from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import ResumedChoice
from ringserve.messages.sessions import SessionRef

PAGE_SIZE = 16
MEMORY = 1 << 20

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("kv-int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        yield path


def start(directory: Path, path: str, kv_cache_dtype: str) -> LoadedExecutor:
    kind, arguments = FAMILY["qwen3"] if path == "fast" else SERVED["llama"]
    checkpoint = directory / path
    if not checkpoint.exists():
        make_checkpoint(checkpoint, kind, arguments)
    executor = LoadedExecutor(
        ModelSource(str(checkpoint), "directory", path),
        "bfloat16" if path == "fast" else "float32",
        block_size=PAGE_SIZE,
        max_num_batched_tokens=64,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=MEMORY,
        max_num_seqs=8,
    )
    assert executor.ready.model_impl == path
    return executor


@pytest.fixture(scope="module", params=["fast", "transformers"])
def executor(request: pytest.FixtureRequest, directory: Path) -> Iterator[LoadedExecutor]:
    loaded = start(directory, request.param, "int8")
    yield loaded
    loaded.actor.shutdown()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, min(VOCAB_SIZE, 199)) for _ in range(length)]


def alone(executor: LoadedExecutor, request: Any) -> list[int]:
    core = EngineCore(executor, SchedulerConfig(enable_prefix_caching=False))
    return core.run([request])[request.request_id, 0].token_ids


def test_what_a_start_says(executor: LoadedExecutor, directory: Path) -> None:
    """The pages that fit are counted with their scales."""
    ready = executor.ready
    assert ready.kv_dtype == "int8"
    layers, heads, dim, item = (3, 2, 128, 2) if ready.model_impl == "fast" else (4, 2, 16, 4)
    assert ready.num_pages == MEMORY // (layers * heads * 2 * PAGE_SIZE * (dim + 4))
    other = start(directory, ready.model_impl, "auto")
    assert other.ready.kv_dtype == other.ready.dtype
    assert other.ready.num_pages == MEMORY // (layers * heads * 2 * PAGE_SIZE * dim * item)
    other.actor.shutdown()


def test_preempted_and_found_pages(executor: LoadedExecutor) -> None:
    requests = [greedy(i, prompt_of(17 + 16 * (i % 2), i // 2), 40) for i in range(6)]
    core = EngineCore(executor, SchedulerConfig(), num_pages=14, max_num_seqs=6)
    core.run(requests)
    assert core.stats is not None
    assert core.stats.num_preemptions > 0
    assert core.stats.num_prefix_hits > 0
    for request in requests:
        assert core.results[request.request_id, 0].token_ids == alone(executor, request)


def test_a_conversations_next_turn(executor: LoadedExecutor) -> None:
    """It writes on in a page that is not full, beside what was there."""
    core = EngineCore(executor, SchedulerConfig())
    said, session = prompt_of(21, 7), SessionRef("key", "talk")
    for turn in range(3):
        request = msgspec.structs.replace(greedy(turn, said, 9), session=session)
        before = sum(times.num_tokens for times in core.times)
        answer = core.run([request])[turn, 0].token_ids
        computed = sum(times.num_tokens for times in core.times) - before
        assert computed == (21 + 8 if turn == 0 else 1 + 6 + 8)  # its answer's last token, what is new, its own answer
        assert answer == alone(executor, request)
        said = [*said, *answer, *prompt_of(6, 20 + turn)]


def test_resumed_requests(executor: LoadedExecutor) -> None:
    whole = greedy(0, prompt_of(30, 9), 12)
    tokens = alone(executor, whole)
    for done in (1, 5, 11):
        known = ResumedChoice(0, pack_i32(tokens[:done]), 0)
        core = EngineCore(executor, SchedulerConfig())
        others = [greedy(i, prompt_of(10 * i, 30 + i), 9) for i in (1, 2, 3)]
        core.run([*others, msgspec.structs.replace(whole, resumed=(known,))])
        assert core.results[0, 0].token_ids == tokens[done:]


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "chosen"),
    [
        ("auto", "bfloat16", "cpu", "bfloat16"),
        ("auto", "float32", "cpu", "float32"),
        ("int8", "bfloat16", "cpu", "int8"),
        ("int8", "float16", "cuda", "int8"),
        ("fp8", "bfloat16", "cuda", "float8"),
    ],
)
def test_the_type_of_keys_and_values(asked: Any, dtype: Any, device: str, chosen: str) -> None:
    assert choose_kv_dtype(asked, dtype, device) == chosen


def test_fp8_is_refused_on_cpus() -> None:
    with pytest.raises(ModelError, match=r"^--kv-cache-dtype fp8 is for GPUs; use int8 on this CPU, or leave it out$"):
        choose_kv_dtype("fp8", "bfloat16", "cpu")
