"""The extension under strict compilers and sanitizers; the wheel, with and without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ring_builds import RING, WARNINGS, build, compilers, load

REPOSITORY = Path(__file__).parents[2]
RUNNER = REPOSITORY / "tests" / "support" / "pytest_with_ring.py"
SHIPPED = ("ringserve", "engine", "frontend", "shm", "kernels", "bench")
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def run_tests(extension: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """The output of a run of this directory's tests with another extension; fails with it."""
    command = [sys.executable, "-P", str(RUNNER), extension, "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("compiler", compilers())
@pytest.mark.parametrize("flags", [(), ("-DRINGSERVE_WITHOUT_FENCES",)], ids=["", "without-fences"])
def test_no_warnings(tmp_path: Path, compiler: str, flags: tuple[str, ...]) -> None:
    path = build(tmp_path / "_ring.so", RING, *WARNINGS, *flags, compiler=compiler)
    assert load("_ring", path).LAYOUT_VERSION > 0


def test_hostile_rings_under_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    """Every test of hostile contents, of attaching and of the channel's functions: no bad access, no overflow."""
    path = build(tmp_path / "_ring.so", RING, *SANITIZERS, compiler="gcc")
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = {
        "LD_PRELOAD": str(Path(asan.stdout.strip()).resolve()),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # the interpreter itself does not free everything
        "PYTHONMALLOC": "malloc",  # so that the messages' own bounds are watched
    }
    files = [f"tests/shm/{name}.py" for name in ("test_hostile", "test_ring_memory", "test_channel", "test_typed")]
    output = run_tests(str(path), *files, "-k", "not socket", environment=environment)
    assert " passed" in output
    assert " failed" not in output


def test_the_sanitizers_would_tell(tmp_path: Path) -> None:
    """The same way of running, with a module that reads behind a block."""
    source = tmp_path / "bad.c"
    source.write_text(
        "#define Py_LIMITED_API 0x030B0000\n#include <Python.h>\n#include <stdlib.h>\n"
        "PyMODINIT_FUNC PyInit__ring(void) {\n    char *volatile block = malloc(8);\n"
        "    if (block[8])\n        PyErr_SetNone(PyExc_OSError);\n    return NULL;\n}\n"
    )
    path = build(tmp_path / "_ring.so", [str(source)], *SANITIZERS, "-fno-sanitize=object-size", compiler="gcc")
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    done = subprocess.run(
        [sys.executable, "-P", str(RUNNER), str(path)],
        env=os.environ | {"LD_PRELOAD": str(Path(asan.stdout.strip()).resolve()), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def build_wheel(tmp_path: Path, compiler: str) -> Path:
    """A wheel of this checkout, built from a copy."""
    copy, wheels = tmp_path / "source", tmp_path / "wheels"
    copy.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *SHIPPED, "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    archive = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=REPOSITORY, check=True, input=listed.stdout, capture_output=True
    )
    subprocess.run(["tar", "-x"], cwd=copy, check=True, input=archive.stdout)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env=os.environ | {"CC": compiler},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("*.whl")
    return wheel


def test_the_wheel_serves_every_later_python(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, "gcc")
    assert "-cp311-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "ringserve/shm/_ring.abi3.so" in names
    assert "ringserve/shm/channel.py" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ringserve"}


def test_the_wheel_holds_every_file_that_the_packages_read(tmp_path: Path) -> None:
    """Modules, and what lies beside them: all but C, which is compiled, and benchmarks' results, which are written."""
    listed = subprocess.run(["git", "ls-files", *SHIPPED], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    kept = [name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()]
    kept = [name for name in kept if not name.endswith((".c", ".h")) and not name.startswith("bench/results/")]
    assert any(not name.endswith((".py", "py.typed")) for name in kept)
    with zipfile.ZipFile(build_wheel(tmp_path, "false")) as wheel:
        names = set(wheel.namelist())
        assert {f"ringserve/{name.removeprefix('ringserve/')}" for name in kept} <= names
        for name in kept:
            assert wheel.read(f"ringserve/{name.removeprefix('ringserve/')}") == (REPOSITORY / name).read_bytes(), name


def test_installing_without_a_compiler_works(tmp_path: Path) -> None:
    """What such a wheel installs passes the channel's functional tests over sockets."""
    wheel = build_wheel(tmp_path, "false")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".c"))]
        archive.extractall(installed)
    files = [
        f"tests/shm/{name}.py"
        for name in ("test_channel", "test_doorbell", "test_socket_bell", "test_typed", "test_spawn")
    ]
    environment = {"PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import ringserve.shm as s; print(s.__file__, s.ring_unavailable_reason())"],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(installed))
    assert "compiler" in where.stdout
    asks_for_a_ring = "tests/shm/test_doorbell.py::test_no_ring_while_awake"
    output = run_tests("none", *files, "--deselect", asks_for_a_ring, environment=environment)
    assert " passed" in output
