"""A later start trusts an earlier one's check only where nothing has changed that the check depended on."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kept_starts import kept_file, make_settings, settings_of

import ringserve
from ringserve.config import ExecutorSettings
from ringserve.engine import kept_model
from ringserve.engine.kept_model import MAX_RECORDS, load_record, start_key, store_record
from ringserve.engine.kept_weights import KERNELS, KeptWeights
from ringserve.kernels.source_digest import source_digest


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
    package = Path(ringserve.__file__).parent
    directories = [package, package / "messages", Path(kept_model.__file__).parent, KERNELS, KERNELS / "cpu"]
    assert [path.resolve() for path in kept_model.SOURCES] == [path.resolve() for path in directories]
    for changed in kept_model.SOURCES:
        assert list(changed.glob("*.py"))
        missing_with(
            kept_model,
            "source_digest",
            lambda path, changed=changed: b"other code" if path == changed else source_digest(path),
        )


def test_no_directory_of_a_starts_code_is_forgotten() -> None:
    """Whatever a start on CPUs may import of this project, at whatever depth, is in the key."""
    package = Path(ringserve.__file__).parent
    found = {package / "__init__.py"}  # what it names is imported when somebody asks for it
    waiting = [package / "engine" / "cpu_startup.py"]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ringserve":
                module = package.joinpath(*(node.module or "").split(".")[1:])
                paths = [module.with_suffix(".py"), module / "__init__.py"]
                paths += [module / f"{alias.name}.py" for alias in node.names]
                waiting += [path for path in paths if path.exists()]
    assert {"fast_decoder.py", "cpu_loading.py", "kept_model.py", "sampling.py"} <= {file.name for file in found}
    assert {file.parent.resolve() for file in found} <= {path.resolve() for path in kept_model.SOURCES}


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
