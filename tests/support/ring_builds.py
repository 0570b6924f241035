"""The ring's extension, built with other flags than the product's, into a directory of the caller's."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import ringserve.shm

SOURCES = Path(ringserve.shm.__file__).resolve().parent
RING = tuple(str(SOURCES / name) for name in ("_ring.c", "_doorbell.c", "_sleep.c", "_producer.c", "_consumer.c"))
WAKEUP_RACE = (str(Path(__file__).with_name("wakeup_race.c")),)
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def compilers() -> list[str]:
    """Those that are installed here."""
    return [name for name in ("gcc", "clang") if shutil.which(name)]


def build(target: Path, sources: Sequence[str], *flags: str, compiler: str = "cc") -> Path:
    """Compile and link a module; raises CalledProcessError, with the compiler's words on stderr."""
    include = sysconfig.get_paths()["include"]
    command = [compiler, "-shared", "-fPIC", "-O2", "-std=c11", "-pthread", "-fvisibility=hidden", *flags]
    subprocess.run([*command, f"-I{include}", f"-I{SOURCES}", *sources, "-o", str(target)], check=True)
    return target


def load(name: str, path: Path) -> ModuleType:
    """Import an extension module from a file; ``name``'s last part is that of its PyInit function."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
