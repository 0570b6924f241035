"""One command that verifies and measures everything on a GPU machine, in at most eight minutes.

    python -P -m ringserve.bench.gpu_check --output gpu.json      on a machine with a GPU
    python -P -m ringserve.bench.gpu_check --dry                  anywhere: the same code, small, nothing is measured

From a checkout that is not installed, with packages that the machine lacks as wheels in a directory::

    PYTHONPATH=. python3 -P -m ringserve.bench.gpu_check --wheels wheels

Each phase is a process of its own with a deadline, so that neither a hang nor a crash takes the rest along. The result
is written again after every phase. Status 1 where a phase failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from dataclasses import dataclass
from pathlib import Path

TOTAL_SECONDS = 480.0
MARK = "gpu_check result: "


@dataclass(frozen=True)
class Phase:
    """A function of a module of ``bench.gpu`` that takes the device and returns what it found."""

    name: str
    module: str
    function: str
    seconds: float
    """Deadline."""


PHASES = (
    Phase("environment", "environment_phases", "describe_environment", 40),
    Phase("copies", "memory_phases", "measure_copies", 30),
    Phase("kernels", "environment_phases", "check_kernels", 150),
    Phase("pool", "memory_phases", "check_pool", 40),
    Phase("model", "model_phases", "check_model", 60),
    Phase("graphs", "model_phases", "check_graphs", 90),
    Phase("runner", "runner_phase", "check_runner", 60),
    Phase("startup", "startup_phase", "check_startup", 100),
    Phase("decode_attention", "attention_phases", "measure_decode", 60),
    Phase("prefill_attention", "attention_phases", "measure_prefill", 60),
    Phase("model_speed", "model_phases", "measure_model", 120),
    Phase("runner_speed", "runner_phase", "measure_runner", 60),
    Phase("serving", "serving_phase", "measure_serving", 120),
)


def main() -> int:
    """Run all phases, or the one of ``--phase`` in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--output", type=Path, help="where the JSON goes; written again after each phase")
    parser.add_argument("--only", nargs="*", choices=[phase.name for phase in PHASES], help="these phases alone")
    parser.add_argument("--wheels", type=Path, help="directory of wheels to be used without installing them")
    parser.add_argument("--phase", choices=[phase.name for phase in PHASES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase is not None:
        return _run_here(next(phase for phase in PHASES if phase.name == options.phase), options.dry)
    if options.wheels is not None and not list(options.wheels.glob("*.whl")):
        parser.error(f"no wheels in {options.wheels}")
    with tempfile.TemporaryDirectory() as unpacked:
        search_path = _unpack(options.wheels, Path(unpacked)) if options.wheels is not None else []
        return _run_all(options.dry, options.output, options.only, search_path)


def _unpack(wheels: Path, target: Path) -> list[str]:
    """Wheels as one directory for PYTHONPATH (extensions cannot be imported from an archive)."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return [str(target)]


def _run_all(dry: bool, output: Path | None, only: list[str] | None, search_path: list[str]) -> int:
    environment = dict(os.environ)
    path = [*search_path, *filter(None, [environment.get("PYTHONPATH")])]
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(path)
    # Triton's own switch, read when it is imported; it must not leak from or into anything else.
    environment.pop("TRITON_INTERPRET", None)
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    results: dict[str, dict[str, object]] = {}
    for phase in PHASES:
        if only and phase.name not in only:
            continue
        left = TOTAL_SECONDS - (time.monotonic() - started)
        results[phase.name] = _run_phase(phase, dry, min(phase.seconds, left), environment)
        if output is not None:
            output.write_text(json.dumps({"dry": dry, "phases": results}, indent=1) + "\n")
        line = {key: value for key, value in results[phase.name].items() if key != "runs"}
        print(f"{phase.name}: {json.dumps(line)}"[:2000], flush=True)
    failed = [name for name, result in results.items() if not result["passed"]]
    print(f"{len(results) - len(failed)} of {len(results)} phases passed" + (f"; failed: {failed}" if failed else ""))
    return 1 if failed else 0


def _run_phase(phase: Phase, dry: bool, seconds: float, environment: dict[str, str]) -> dict[str, object]:
    if seconds <= 0:
        return {"passed": False, "error": "no time was left"}
    command = [sys.executable, "-P", "-m", "ringserve.bench.gpu_check", "--phase", phase.name]
    started = time.monotonic()
    with subprocess.Popen(
        [*command, *(["--dry"] if dry else [])],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            return {"passed": False, "error": f"not done after {seconds:.0f} s"}
    result: dict[str, object] = {"passed": process.returncode == 0, "seconds": round(time.monotonic() - started, 1)}
    for line in output.splitlines():
        if line.startswith(MARK):
            result.update(json.loads(line.removeprefix(MARK)))
    if process.returncode != 0 and "error" not in result:
        result["error"] = f"status {process.returncode}: {errors.strip()[-800:]}"
    return result


def _run_here(phase: Phase, dry: bool) -> int:
    """The child's side: the result, or what went wrong, as one marked line of JSON."""
    status = 0
    try:
        import torch

        from ringserve.bench.gpu.device import Device

        torch.set_num_threads(1)
        if not dry and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device; --dry runs without one")
        module = importlib.import_module(f"ringserve.bench.gpu.{phase.module}")
        with torch.inference_mode():
            result = getattr(module, phase.function)(Device(dry))
    except Exception as error:
        # Whatever it is belongs into the report.
        result, status = (
            {"error": f"{type(error).__name__}: {error}"[:4000], "trace": traceback.format_exc()[-1500:]},
            1,
        )
    print(MARK + json.dumps(result), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
