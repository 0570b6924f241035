"""A later start trusts an earlier one's check only where nothing has changed that the check depended on."""

from __future__ import annotations

import ast
import errno
import os
import shutil
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
from step_planner import GREEDY

import ringserve
from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine import cpu_loading, fast_startup, kept_model, kept_weights
from ringserve.engine.cpu_startup import build_cpu_engine
from ringserve.engine.decoder_weights import Rotary
from ringserve.engine.devices import CPU
from ringserve.engine.kept_model import MAX_RECORDS, load_record, start_key, store_record
from ringserve.engine.kept_weights import KERNELS, PACKING_MODULES, KeptWeights, packing_digest
from ringserve.engine.ready_engine import Engine
from ringserve.engine.weight_cache import WeightCache
from ringserve.kernels.source_digest import source_digest
from ringserve.messages import NewSequence, SchedulerOutput, pack_i32, unpack_i32


def make_settings(path: Path, **changes: Any) -> ExecutorSettings:
    config = {"block_size": 16, "threads": 1} | changes.pop("config", {})
    fields: dict[str, Any] = {
        "source": ModelSource(str(path), "directory", "model"),
        "dtype": "bfloat16",
        "max_model_len": None,
        "max_num_seqs": 4,
        "max_num_batched_tokens": None,
    } | changes
    return ExecutorSettings(config=ExecutorConfig(**config), **fields)


def start(settings: ExecutorSettings) -> Engine:
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and what its first start has kept."""
    home = tmp_path_factory.mktemp("kept")
    path = make_checkpoint(home / "model", *FAMILY["qwen2-sliding"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        start(make_settings(path)).runner.close()
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model (other tests have changed nothing about it) and a copy of what was kept."""
    shutil.copytree(made / "cache", tmp_path / "cache")
    (tmp_path / "model").symlink_to(made / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that a test may change, started once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_checkpoint(tmp_path / "model", *FAMILY["llama"])
    start(make_settings(path)).runner.close()
    return tmp_path


@pytest.fixture
def is_recalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[ExecutorSettings], bool]:
    """Whether a start does without the whole way (which is not gone here)."""

    class WholeWay(Exception):
        """Not taken here."""

    def refuse(*_: Any) -> None:
        raise WholeWay

    monkeypatch.setattr(cpu_loading, "load_and_check", refuse)

    def recalled(settings: ExecutorSettings) -> bool:
        try:
            start(settings).runner.close()
        except WholeWay:
            return False
        return True

    return recalled


def settings_of(home: Path, **changes: Any) -> ExecutorSettings:
    return make_settings((home / "model").resolve(), **changes)


def kept_file(home: Path, suffix: str) -> Path:
    (path,) = (home / "cache" / "ringserve" / "weights").glob(f"*{suffix}")
    return path


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


def test_every_other_setting_counts(home: Path) -> None:
    """Options that are added later, too."""
    plain = settings_of(home)
    key = start_key(plain, "bfloat16", "files")
    assert key == start_key(plain, "bfloat16", "files")
    assert key != start_key(plain, "float32", "files")
    assert key != start_key(plain, "bfloat16", "other files")
    free = {"log_level", "max_num_seqs", "max_num_batched_tokens", "threads", "kv_cache_memory", "swap_space", "name"}
    changed = []
    for field in msgspec.structs.fields(plain):
        if field.name in ("config", "source"):
            part = getattr(plain, field.name)
            changed += [
                (inner.name, msgspec.structs.replace(plain, **{field.name: _with(part, inner.name)}))
                for inner in msgspec.structs.fields(part)
            ]
        else:
            changed.append((field.name, _with(plain, field.name)))
    assert free < {name for name, _ in changed}
    for name, settings in changed:
        assert (start_key(settings, "bfloat16", "files") == key) == (name in free), name


def _with(part: Any, name: str) -> Any:
    return msgspec.structs.replace(part, **{name: "something else"})


def test_the_code_the_libraries_and_the_processor_count(
    home: Path, monkeypatch: pytest.MonkeyPatch, is_recalled: Callable[[ExecutorSettings], bool]
) -> None:
    settings = settings_of(home)
    assert is_recalled(settings)

    def missing_with(target: Any, name: str, value: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            assert not is_recalled(settings), (name, value)
        assert is_recalled(settings)

    for library in ("numba", "llvmlite", "numpy", "torch", "transformers", "safetensors"):
        found = kept_model._version
        missing_with(
            kept_model, "_version", lambda name, library=library, found=found: "9" if name == library else found(name)
        )
    missing_with(kept_model, "__version__", "9")
    missing_with(kept_model, "FORMAT", 99)
    missing_with(sys, "version", "3.99")
    missing_with(kept_model, "processor", lambda: "another")
    directories = [Path(ringserve.__file__).parent, Path(kept_model.__file__).parent, KERNELS, KERNELS / "cpu"]
    assert [path.resolve() for path in kept_model.SOURCES] == [path.resolve() for path in directories]
    for changed in kept_model.SOURCES:
        assert list(changed.glob("*.py"))
        missing_with(
            kept_model,
            "source_digest",
            lambda path, changed=changed: b"other code" if path == changed else source_digest(path),
        )


def test_the_models_files_count(own_home: Path, is_recalled: Callable[[ExecutorSettings], bool]) -> None:
    path = own_home / "model"
    settings = settings_of(own_home)
    assert is_recalled(settings)
    weights = path / "model.safetensors"

    # The same size and times: the file was written by something that keeps times.
    before, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-4] + bytes(4))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert not is_recalled(settings)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "b.safetensors"]
)
def test_a_file_beside_the_weights_counts(
    home: Path, name: str, is_recalled: Callable[[ExecutorSettings], bool]
) -> None:
    copy = home / "copy"
    shutil.copytree(home / "model", copy)
    settings = make_settings(copy)
    kept = KeptWeights("none", copy, home / "cache" / "ringserve" / "weights")
    (copy / name).write_bytes((copy / name).read_bytes() + b"\n" if (copy / name).exists() else b"{}")
    assert not kept.is_current()
    key = start_key(settings, "bfloat16", kept.identity)
    assert key != start_key(settings, "bfloat16", KeptWeights("none", copy, None).identity)


def test_a_damaged_record_is_none(home: Path, is_recalled: Callable[[ExecutorSettings], bool]) -> None:
    settings = settings_of(home)
    file = kept_file(home, ".checked")
    whole = file.read_bytes()
    rng = np.random.default_rng(5)
    for length in [0, 10, 64, 65, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        assert not is_recalled(settings), length
    for at in rng.integers(0, len(whole), 20).tolist():
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert not is_recalled(settings), at
    file.write_bytes(whole + b" ")
    assert not is_recalled(settings)
    file.write_bytes(whole)
    assert is_recalled(settings)
    # A record under another one's name.
    other = settings_of(home, max_model_len=100)
    key = start_key(other, "bfloat16", KeptWeights("none", (home / "model").resolve(), None).identity)
    shutil.copy(file, kept_model._path(file.parent, key))
    assert not is_recalled(other)
    file.unlink()
    assert not is_recalled(settings)


def test_weights_that_are_not_those_checked(home: Path, is_recalled: Callable[[ExecutorSettings], bool]) -> None:
    settings = settings_of(home)
    file = kept_file(home, ".weights")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert not is_recalled(settings)
    file.write_bytes(whole)
    assert is_recalled(settings)
    # A sound file of the same key with other numbers in it.
    kept = KeptWeights("none", (home / "model").resolve(), file.parent)
    kept.read()
    assert kept.entry is not None
    arrays = dict(kept.entry.arrays)
    arrays["norm"] = arrays["norm"] + 1
    WeightCache(file.parent).store(kept._key, arrays)
    assert not is_recalled(settings)
    # Sound, and the checksum in the record is theirs, but something is missing.
    record = load_record(file.parent, start_key(settings, "bfloat16", kept.identity))
    assert record is not None
    for missing in ("embedding", "norm", "rotary", "head.weight", "layers.1.mlp_norm", "layers.2.down.bias"):
        checksum = WeightCache(file.parent).store(kept._key, {k: v for k, v in arrays.items() if k != missing})
        store_record(file.parent, msgspec.structs.replace(record, weights=checksum))
        assert not is_recalled(settings), missing
    file.unlink()
    assert not is_recalled(settings)


def test_other_ways_to_compute_are_never_recalled(home: Path, is_recalled: Callable[[ExecutorSettings], bool]) -> None:
    assert not is_recalled(settings_of(home, dtype="float32"))
    assert not is_recalled(settings_of(home, config={"model_impl": "transformers"}))
    assert not is_recalled(settings_of(home, config={"quantization": "int8"}))
    assert not is_recalled(settings_of(home, config={"block_size": 8}))


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


def test_records_do_not_pile_up(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = kept_file(home, ".checked")
    (file.parent / "gone.checked").symlink_to(file.parent / "gone")  # another start was faster
    (file.parent / "other.checked").mkdir()  # somebody else's, which cannot be removed
    os.utime(file.parent / "other.checked", (1, 1))
    settings = settings_of(home)
    identity = KeptWeights("none", (home / "model").resolve(), None).identity
    record = load_record(file.parent, start_key(settings, "bfloat16", identity))
    assert record is not None
    for number in range(MAX_RECORDS + 3):
        store_record(file.parent, msgspec.structs.replace(record, key=str(number)))
        os.utime(kept_model._path(file.parent, str(number)), (1000 + number, 1000 + number))
    os.utime(file)
    store_record(file.parent, msgspec.structs.replace(record, key="newest"))
    assert len([path for path in file.parent.glob("*.checked") if path.is_file()]) == MAX_RECORDS
    assert caplog.text == ""
    assert file.exists()
    assert load_record(file.parent, "newest") is not None
    assert load_record(file.parent, "0") is None


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


def test_what_packing_depends_on_is_in_the_weights_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = packing_digest()
    for changed in (KERNELS, KERNELS / "cpu"):
        with monkeypatch.context() as patch:
            patch.setattr(
                kept_weights,
                "source_digest",
                lambda path, changed=changed: b"other code" if path == changed else source_digest(path),
            )
            assert packing_digest() != digest
    contents = Path.read_bytes
    for name in PACKING_MODULES:
        with monkeypatch.context() as patch:
            patch.setattr(
                Path,
                "read_bytes",
                lambda path, name=name: contents(path) + (b"#" if path.name == f"{name}.py" else b""),
            )
            assert packing_digest() != digest, name
    kept = KeptWeights("none", (home / "model").resolve(), home / "cache" / "ringserve" / "weights")
    kept.read()
    assert kept.entry is not None
    monkeypatch.setattr(kept_weights, "packing_digest", lambda: "other code")
    other = KeptWeights("none", (home / "model").resolve(), home / "cache" / "ringserve" / "weights")
    other.read()
    assert other.entry is None


def test_no_module_that_packs_is_forgotten() -> None:
    """Whatever the packing modules import of the engine packs, too, or is known to have no part in it."""
    no_part = {"kept_weights", "self_check"}  # whose token ids calibrate: others would do as well
    engine = Path(kept_weights.__file__).parent
    for name in PACKING_MODULES:
        for node in ast.walk(ast.parse((engine / f"{name}.py").read_bytes())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("ringserve.engine."):
                imported = module.removeprefix("ringserve.engine.")
                assert imported in {*PACKING_MODULES, *no_part}, f"{name} imports {imported}"


def test_auto_means_the_same_format_to_both_ways(home: Path, is_recalled: Callable[[ExecutorSettings], bool]) -> None:
    """ "auto" is another setting than "bfloat16", even where it means that."""
    assert not is_recalled(settings_of(home, dtype="auto"))
