"""Packed weights survive a restart, and nothing that is damaged is ever used."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_arrays import example_arrays, store_often

from ringserve.engine.fast_packing import Packer
from ringserve.engine.kept_weights import KeptWeights
from ringserve.engine.weight_cache import WeightCache, source_identity


def _entry(directory: Path) -> Path:
    (path,) = directory.glob("*.weights")
    return path


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "below" / "weights")
    assert cache.load("model a") is None
    checksum = cache.store("model a", example_arrays())
    entry = WeightCache(tmp_path / "below" / "weights").load("model a")
    assert entry is not None
    assert entry.checksum == checksum
    loaded = entry.arrays
    assert list(loaded) == list(example_arrays())
    for name, array in example_arrays().items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].ctypes.data % 64 == 0
    assert cache.load("model b") is None
    assert not list((tmp_path / "below" / "weights").glob(".partial-*"))


def test_a_cut_file_is_absent_and_replaced(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    arrays = {"a": np.arange(3000, dtype=np.int32)}
    cache.store("key", arrays)
    whole = _entry(tmp_path).read_bytes()
    for length in [*range(0, 4096, 97), 4096, 9000, len(whole) - 1]:
        _entry(tmp_path).write_bytes(whole[:length])
        assert cache.load("key") is None, length
    _entry(tmp_path).write_bytes(whole + b"\0")
    assert cache.load("key") is None
    cache.store("key", arrays)
    assert cache.load("key") is not None


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("cache")
    cache = WeightCache(directory)
    array = np.arange(60, dtype=np.int32)
    cache.store("key", {"a": array})
    content = bytearray(_entry(directory).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    _entry(directory).write_bytes(content)
    loaded = cache.load("key")
    # Bytes between the description and the payload mean nothing.
    if loaded is not None:
        np.testing.assert_array_equal(loaded.arrays["a"], array)
        assert not any(content[at + 1 : 4096])


def test_another_version_is_absent(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    cache.store("key", example_arrays())
    content = bytearray(_entry(tmp_path).read_bytes())
    content[8:12] = struct.pack("<I", 2)
    _entry(tmp_path).write_bytes(content)
    assert cache.load("key") is None


def test_an_entry_of_another_key_is_absent(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    cache.store("key", example_arrays())
    first = _entry(tmp_path)
    content = first.read_bytes()
    first.unlink()
    cache.store("other", example_arrays(1))
    _entry(tmp_path).write_bytes(content)
    assert cache.load("other") is None


def test_the_least_recently_used_go_when_it_grows_too_large(tmp_path: Path) -> None:
    arrays = {"a": np.zeros(10_000, np.int8)}
    cache = WeightCache(tmp_path, limit=50_000)
    for i in range(3):
        cache.store(str(i), arrays)
    for i, path in enumerate(sorted(tmp_path.glob("*.weights"), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (1000 + i, 1000 + i))
    assert cache.load("0") is not None  # now the most recent
    cache.store("3", arrays)
    assert [cache.load(str(i)) is not None for i in range(4)] == [True, False, True, True]
    # One that is larger than the limit is kept as long as it is the newest.
    cache.store("large", {"a": np.zeros(100_000, np.int8)})
    assert cache.load("large") is not None
    assert len(list(tmp_path.glob("*.weights"))) == 1


def test_what_dead_starts_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".partial-old", tmp_path / ".partial-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    WeightCache(tmp_path).store("key", example_arrays())
    assert not old.exists()
    assert new.exists()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = WeightCache(tmp_path / "file" / "weights")
    with pytest.raises(OSError):
        cache.store("key", example_arrays())
    assert cache.load("key") is None


def test_concurrent_starts(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=store_often, args=(tmp_path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".weights"]


def test_identity_changes_with_the_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "a.safetensors").write_bytes(b"12")
    identity = source_identity(model)
    assert source_identity(model) == identity
    os.utime(model / "a.safetensors", (1000, 1000))
    touched = source_identity(model)
    (model / "b.safetensors").write_bytes(b"34")
    assert len({identity, touched, source_identity(model), source_identity(model / "a.safetensors")}) == 4
    with pytest.raises(OSError):
        source_identity(tmp_path / "config.json" / "none")


def test_files_that_the_index_names_count(tmp_path: Path) -> None:
    """They may lie in directories of their own, or be links there, or outside."""
    model, outside = tmp_path / "model", tmp_path / "outside"
    (model / "parts").mkdir(parents=True)
    outside.mkdir()
    (model / "linked").symlink_to(outside)
    parts = [model / "parts" / "1.safetensors", outside / "2.safetensors", outside / "3.safetensors"]
    names = ["parts/1.safetensors", "linked/2.safetensors", "../outside/3.safetensors"]
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))
    for part in parts:
        part.write_bytes(b"12")
    found = {source_identity(model)}
    for part in parts:
        part.write_bytes(b"34")
        os.utime(part, (1000, 1000))
        found.add(source_identity(model))
    assert len(found) == 4


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}', "\0", "[" * 9000])
def test_an_index_that_is_none(tmp_path: Path, index: str) -> None:
    """Whoever loads it says so."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "index" in source_identity(tmp_path)


def test_a_link_to_nothing_holds_no_weights(tmp_path: Path) -> None:
    """Files of a hub snapshot that somebody has removed to save space."""
    (tmp_path / "model.safetensors").write_bytes(b"12")
    identity = source_identity(tmp_path)
    (tmp_path / "consolidated.safetensors").symlink_to(tmp_path / "blob")
    assert source_identity(tmp_path) == identity


def test_a_cache_that_cannot_be_touched_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system, or another user's file."""
    cache = WeightCache(tmp_path)
    cache.store("key", example_arrays())

    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.load("key") is not None


def test_a_source_that_cannot_be_looked_at_is_packed_without_a_cache(tmp_path: Path) -> None:
    kept = KeptWeights("none", tmp_path / "none", tmp_path / "weights")
    kept.read()
    packer = Packer("none", kept)
    assert not packer.found
    assert packer.keep({}) is None
    assert not (tmp_path / "weights").exists()
