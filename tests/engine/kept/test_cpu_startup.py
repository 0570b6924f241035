"""A start that trusts an earlier one's check computes the same, imports little, and is taken only where it may be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoints import make_checkpoint
from fast_models import FAMILY
from kept_starts import make_settings, settings_of, start, tokens_of

from ringserve.config import ExecutorSettings
from ringserve.engine import cpu_loading, fast_startup
from ringserve.engine.decoder_weights import Rotary


@pytest.mark.parametrize("name", ["llama-tied-biases", "llama-rope-llama3", "mistral-window", "qwen3-wide"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_both_starts_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, quantization: str
) -> None:
    """Bit for bit, since the weights, the tables and the code are the same; and they tell everybody the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_checkpoint(tmp_path / "model", *FAMILY[name])
    (path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7, "eos_token_id": [2, 9]}')
    settings = make_settings(path, config={"quantization": quantization})
    engines = [start(settings)]
    with monkeypatch.context() as patch:
        patch.setattr(cpu_loading, "load_and_check", None)
        engines.append(start(settings))
    told = [msgspec.to_builtins(engine.ready(0.0)) for engine in engines]
    assert told[0] == told[1]
    assert (engines[1].eos_token_ids, engines[1].defaults.temperature, engines[1].defaults.top_k) == ((2, 9), 0.25, 7)
    logits = []
    for engine in engines:
        decoder = engine.runner._forward.decoder  # type: ignore[attr-defined]
        ids, table = np.arange(40, dtype=np.int32)[None] * 5, np.arange(1, 4, dtype=np.int32)[None].copy()
        counts, wanted = np.array([40], np.int32), np.arange(40, dtype=np.int32)
        slots, computed = np.zeros(1, np.int32), np.zeros(1, np.int64)
        logits.append(decoder.forward(slots, counts, computed, ids, table, wanted).copy())
    np.testing.assert_array_equal(logits[0].view(np.uint32), logits[1].view(np.uint32))
    assert np.isfinite(logits[0]).all()
    assert tokens_of(engines[0]) == tokens_of(engines[1])


def test_a_second_start_imports_neither_torch_nor_transformers(home: Path) -> None:
    program = (
        "import sys, msgspec\n"
        "from ringserve.config import ExecutorSettings\n"
        "from ringserve.engine.executor_startup import build_engine\n"
        "settings = msgspec.json.decode(sys.argv[1], type=ExecutorSettings)\n"
        "engine = build_engine(settings, 1, 1, lambda stage, fraction: print(stage, fraction))\n"
        "engine.runner.close()\n"
        "print([name for name in ('torch', 'transformers', 'safetensors', 'tokenizers') if name in sys.modules])\n"
    )
    argument = msgspec.json.encode(settings_of(home)).decode()
    result = subprocess.run([sys.executable, "-P", "-c", program, argument], capture_output=True, text=True, check=True)
    *stages, imported = result.stdout.splitlines()
    assert imported == "[]"
    assert stages == [f"{stage} {part}" for stage in ("reading packed weights", "warming up") for part in (0.0, 1.0)]


def test_the_log_says_that_nothing_was_checked(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        start(settings_of(home)).runner.close()
    assert "packed and checked by an earlier start" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"threads": 2}},
        {"config": {"kv_cache_memory": 1 << 20}},
        {"config": {"swap_space": 1 << 20}},
        {"max_num_seqs": 9},
        {"max_num_batched_tokens": 17},
        {"log_level": "debug"},
    ],
    ids=str,
)
def test_what_changes_nothing_about_the_check(
    home: Path, changes: dict[str, Any], is_recalled: Callable[[ExecutorSettings], bool]
) -> None:
    assert is_recalled(settings_of(home, **changes))


def test_other_ways_to_compute_are_never_recalled(home: Path, is_recalled: Callable[[ExecutorSettings], bool]) -> None:
    assert not is_recalled(settings_of(home, dtype="float32"))
    assert not is_recalled(settings_of(home, config={"model_impl": "transformers"}))
    assert not is_recalled(settings_of(home, config={"quantization": "int8"}))
    assert not is_recalled(settings_of(home, config={"block_size": 8}))


def test_auto_means_the_same_format_to_both_ways(home: Path, is_recalled: Callable[[ExecutorSettings], bool]) -> None:
    """ "auto" is another setting than "bfloat16", even where it means that."""
    assert not is_recalled(settings_of(home, dtype="auto"))


def test_tables_no_longer_than_sequences_can_be(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV budget may allow less than the model does."""
    made: list[int] = []
    tables = Rotary.tables

    def recorded(rotary: Rotary, positions: int) -> Any:
        made.append(positions)
        return tables(rotary, positions)

    monkeypatch.setattr(Rotary, "tables", recorded)
    page = 2 * 3 * 2 * 32 * 2 * 16
    engine = start(settings_of(home, config={"kv_cache_memory": 4 * page}))
    engine.runner.close()
    assert engine.budget.max_model_len < 256
    assert made == [engine.budget.max_model_len]


def test_files_that_change_during_the_start_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was loaded may be of either version."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_checkpoint(tmp_path / "model", *FAMILY["llama"])
    prepare = fast_startup.prepare_fast

    def changing(*arguments: Any, **options: Any) -> Any:
        model = prepare(*arguments, **options)
        os.utime(path / "model.safetensors", (1000, 1000))
        return model

    monkeypatch.setattr("ringserve.engine.cpu_loading.prepare_fast", changing)
    start(make_settings(path)).runner.close()
    assert "changed while it was loaded" in caplog.text
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what would help."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = make_settings(make_checkpoint(tmp_path / "model", *FAMILY["llama"]))
    make = tempfile.mkstemp

    def full(prefix: str, dir: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        start(settings).runner.close()
    assert "the packed weights cannot be kept in" in caplog.text
    assert "No space left on device" in caplog.text
    assert "XDG_CACHE_HOME" in caplog.text
    caplog.clear()

    calls: list[Path] = []

    def full_later(prefix: str, dir: Path) -> Any:
        calls.append(dir)
        return make(prefix=prefix, dir=dir) if len(calls) == 1 else full(prefix, dir)

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full_later)
        start(settings).runner.close()
    assert "passed its check cannot be kept in" in caplog.text
    assert "XDG_CACHE_HOME" in caplog.text
