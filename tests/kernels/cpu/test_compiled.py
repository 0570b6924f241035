"""The cache of compiled functions."""

from __future__ import annotations

import ast
import errno
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

from ringserve.kernels.cpu import compiled as compiled_module
from ringserve.kernels.cpu.compiled import SOURCES, is_kept, source_digest

PROGRAM = """
import numpy as np
from ringserve.kernels.cpu.compiled import is_kept
from ringserve.kernels.cpu.quantize import quantize_rows
kept = is_kept(quantize_rows)
x, q, scales = np.ones(64, np.float32), np.empty(64, np.int8), np.empty(2, np.float32)
quantize_rows(x.ctypes.data, 1, 64, 64, x.ctypes.data, q.ctypes.data, scales.ctypes.data)
stats = quantize_rows.stats
print(kept, is_kept(quantize_rows), sum(stats.cache_misses.values()), sum(stats.cache_hits.values()))
"""


def _run() -> str:
    command = [sys.executable, "-P", "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_second_process_compiles_nothing() -> None:
    _run()
    assert _run() == "True True 0 1"


def test_the_stamp_covers_every_file_of_the_package(tmp_path: Path) -> None:
    def stamp() -> bytes:
        source_digest.cache_clear()
        return source_digest(tmp_path)

    (tmp_path / "a.py").write_text("1")
    stamps = [stamp()]
    (tmp_path / "b.py").write_text("2")
    stamps.append(stamp())
    (tmp_path / "b.py").write_text("3")
    stamps.append(stamp())
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    stamps.append(stamp())
    assert len(set(stamps)) == 4
    assert stamp() == stamps[-1]


def test_the_stamp_covers_what_is_imported() -> None:
    """Numbers of other modules are compiled in."""
    root = SOURCES[0].parents[1]
    imported = {
        node.module
        for path in SOURCES[0].glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("ringserve.")
    }
    assert "ringserve.kernels.sampling" in imported
    for name in imported:
        path = root.joinpath(*name.split(".")[1:])
        assert (path if path.is_dir() else path.parent) in SOURCES, name


PROBE = (
    "from ringserve.kernels.cpu.compiled import compiled\n\n@compiled\ndef times(x: int) -> int:\n    return {} * x\n"
)


def _times(directory: Path, factor: int = 2) -> Any:
    """The function as a new process would see it."""
    path = directory / "probe.py"
    path.write_text(PROBE.format(factor))
    namespace: dict[str, Any] = {"__name__": "probe"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["times"]


def _cached(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "__pycache__").iterdir() if path.suffix in (".nbi", ".nbc"))


def test_damaged_files_are_made_anew(tmp_path: Path) -> None:
    assert _times(tmp_path)(4) == 8
    contents = {path: path.read_bytes() for path in _cached(tmp_path)}
    assert [path.suffix for path in contents] == [".nbc", ".nbi"]
    foreign = pickle.dumps(1)
    for path, content in contents.items():
        half = len(content) // 2
        for damaged in (b"", content[:1], content[:half], content[:-1], bytes(len(content)), foreign):
            path.write_bytes(damaged)
            assert _times(tmp_path)(4) == 8
            again = _times(tmp_path)
            assert is_kept(again)
            assert again(4) == 8
            assert sum(again.stats.cache_hits.values()) == 1


def test_a_write_that_fails_leaves_no_older_code_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of the new version is written, its data are not: there was no room for them."""
    assert _times(tmp_path, 2)(4) == 8
    monkeypatch.setattr(compiled_module, "_stamp", lambda: b"another version")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", full)
        assert _times(tmp_path, 3)(4) == 12
    assert _times(tmp_path, 3)(4) == 12
    again = _times(tmp_path, 3)
    assert again(4) == 12
    assert sum(again.stats.cache_hits.values()) == 1


def test_entries_of_another_processor_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = _times(tmp_path)
    assert not is_kept(function)
    assert function(4) == 8
    assert is_kept(function)
    monkeypatch.setattr(type(function.targetctx.codegen()), "magic_tuple", lambda self: ("another", "processor", ""))
    assert not is_kept(function)


def test_without_a_home_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` stays as it is for a user that the system does not know: no directory of that name is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "~/.cache")
    monkeypatch.setattr(compiled_module._InTree, "from_function", lambda *_: None)
    function = _times(tmp_path)
    assert function(4) == 8
    assert not is_kept(function)
    assert [path.name for path in tmp_path.iterdir()] == ["probe.py"]
