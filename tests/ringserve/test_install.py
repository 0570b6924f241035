"""What ``make install`` would install, by the NVIDIA driver that a machine has."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def header(cuda: str) -> str:
    return f"| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      {cuda} |"


def pip_lines(tmp_path: Path, smi: str | None, target: str = "install", *arguments: str) -> list[str]:
    """pip's command lines of a dry run on a machine whose nvidia-smi is this script; None: without one."""
    path = tmp_path / "bin"
    path.mkdir()
    for tool in ("sh", "sed", "head", "env"):
        (path / tool).symlink_to(next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / tool).exists()))
    if smi is not None:
        (path / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
        (path / "nvidia-smi").chmod(0o755)
    make = next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / "make").exists())
    result = subprocess.run(
        [str(make), "-n", f"VENV={tmp_path / 'venv'}", target, *arguments],
        cwd=ROOT,
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in result.stdout.splitlines() if " -c constraints" in line]


@pytest.mark.parametrize(
    ("smi", "constraints", "what"),
    [
        (None, "constraints.txt", '-e "."'),
        ("exit 9", "constraints.txt", '-e "."'),  # a driver that does not run
        (f"echo '{header('CUDA Version: 12.4')}'", "constraints-cuda12.txt", '-e ".[cuda12]"'),
        (f"echo '{header('CUDA Version: 13.0')}'", "constraints-cuda13.txt", '-e ".[cuda13]"'),
        (f"echo '{header('CUDA UMD Version: 13.1')}'", "constraints-cuda13.txt", '-e ".[cuda13]"'),
        (f"echo '{header('CUDA Version: 14.0')}'", "constraints-cuda13.txt", '-e ".[cuda13]"'),
        (f"echo '{header('CUDA Version: 11.8')}'", "constraints.txt", '-e "."'),
        (f"echo '{header('CUDA Version: N/A')}'", "constraints.txt", '-e "."'),
    ],
)
def test_the_drivers_extra_and_build_of_torch(tmp_path: Path, smi: str | None, constraints: str, what: str) -> None:
    (line,) = pip_lines(tmp_path, smi)
    assert f" -c {constraints} {what}" in line


def test_for_development_and_for_cpus_all_the_same(tmp_path: Path) -> None:
    smi = f"echo '{header('CUDA Version: 12.8')}'"
    (tmp_path / "a").mkdir()
    first, second = pip_lines(tmp_path / "a", smi, "install-dev")
    assert '-c constraints-cuda12.txt -e ".[cuda12]"' in first
    assert '-c constraints-cuda12.txt -e ".[dev,cuda12]"' in second
    (tmp_path / "b").mkdir()
    (line,) = pip_lines(tmp_path / "b", smi, "install", "GPU=")
    assert '-c constraints.txt -e "."' in line


def test_constraints_are_of_one_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = (ROOT / "constraints.txt").read_text().strip()
    assert re.fullmatch(r"torch==2\.13\.\d+", plain)
    for extra, index in (("cuda12", "cu126"), ("cuda13", "cu130")):
        lines = (ROOT / f"constraints-{extra}.txt").read_text().splitlines()
        assert lines == [f"--extra-index-url https://download.pytorch.org/whl/{index}", f"{plain}+{index}"]
        assert any(need.startswith(f"cupy-{extra}x") for need in project["optional-dependencies"][extra])
