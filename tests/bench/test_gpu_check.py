"""``gpu_check``: the dry run does all that a GPU would, and whatever goes wrong is in the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from ringserve.bench.gpu import environment_phases, startup_phase
from ringserve.bench.gpu.device import Device
from ringserve.bench.gpu_check import PHASES, TOTAL_SECONDS, Phase, _run_phase, _unpack
from ringserve.bench.kernel_cases.run import FAMILIES


def _check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "ringserve.bench.gpu_check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    result = _check("--dry", "--output", str(tmp_path / "gpu.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["dry"] is True
    assert list(report["phases"]) == [phase.name for phase in PHASES]
    assert report["phases"]["model"]["relative_error"] < 1e-5
    assert len(report["phases"]["decode_attention"]["runs"]) == 3
    assert report["phases"]["serving"]["streams"] == 3


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = _check("--only", "copies", "--output", str(tmp_path / "gpu.json"))
    assert result.returncode == 1
    assert "--dry runs without one" in json.loads((tmp_path / "gpu.json").read_text())["phases"]["copies"]["error"]


def test_hangs_and_crashes_end_a_phase_alone() -> None:
    environment = dict(os.environ)
    late = _run_phase(Phase("copies", "", "", 0), True, 0.01, environment)
    assert late == {"passed": False, "error": "not done after 0 s"}
    assert _run_phase(PHASES[0], True, -1.0, environment) == {"passed": False, "error": "no time was left"}
    broken = _run_phase(Phase("no such phase", "", "", 0), True, 60, environment)
    assert broken["passed"] is False
    assert "status 2" in str(broken["error"])


@pytest.mark.parametrize(
    ("module", "seconds", "check"),
    [(environment_phases, "KERNEL_SECONDS", "check_kernels"), (startup_phase, "SECONDS", "check_startup")],
)
def test_parts_that_are_late_are_told(
    module: ModuleType, seconds: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase knows its own deadline, so that what its other parts found is not lost with it."""
    (phase,) = [phase for phase in PHASES if phase.function == check]
    assert getattr(module, seconds) <= phase.seconds - 15
    monkeypatch.setattr(module, seconds, 0.0)
    with pytest.raises(AssertionError, match=r"1 of 1 .* failed: .*not done"):
        getattr(module, check)(Device(dry=True))


def test_every_family_of_kernels_is_checked_on_a_device() -> None:
    assert set(environment_phases.CASES) == set(FAMILIES)


def test_the_whole_ends_in_time() -> None:
    assert TOTAL_SECONDS <= 480
    assert len({phase.name for phase in PHASES}) == len(PHASES)


def test_wheels_are_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "NUMBER = 17\n")
    (path,) = _unpack(tmp_path, tmp_path / "unpacked")
    code = "import carried, sys; sys.exit(carried.NUMBER)"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False, timeout=60
    )
    assert result.returncode == 17
    empty = _check("--wheels", str(tmp_path / "unpacked"))
    assert empty.returncode == 2
    assert "no wheels in" in empty.stderr
