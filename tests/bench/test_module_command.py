"""Benchmarks that are run as modules: a mistake is one line and exit status 2, before anything is measured."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringserve.bench.module_command import at_least_one, at_least_zero, positive, run_module
from ringserve.model_source import ModelNotFound
from ringserve.options import OptionError

BENCH = Path(__file__).parents[2] / "bench"
MODULES = sorted(path.stem for path in BENCH.glob("*.py") if "run_module(main)" in path.read_text(encoding="utf-8"))
NUMBER = re.compile(r'add_argument\("(--[a-z0-9-]+)", type=(at_least_one|at_least_zero|positive)')


def numbers(module: str) -> list[tuple[str, str]]:
    """A module's flags that take numbers, and of which kind."""
    return NUMBER.findall((BENCH / f"{module}.py").read_text(encoding="utf-8"))


def test_every_benchmark_that_is_a_module_takes_part() -> None:
    alone = {path.stem for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    assert alone - set(MODULES) <= {"busy", "gpu_check"}  # without a parser, and without numbers
    assert len(MODULES) >= 10
    for module in MODULES:
        text = (BENCH / f"{module}.py").read_text(encoding="utf-8")
        assert not re.search(r"type=(int|float)\b", text), module


@pytest.mark.parametrize("module", MODULES)
def test_no_number_may_be_none_or_negative(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"ringserve.bench.{module}").main
    for flag, kind in numbers(module):
        for value in ["x", "nan", "-1"] + ["0"] * (kind != "at_least_zero"):
            monkeypatch.setattr(sys, "argv", ["bench", flag, value])
            with pytest.raises(SystemExit) as caught:
                main()
            told = capsys.readouterr()
            assert (caught.value.code, told.out, told.err.count("\n")) == (2, "", 1)
            assert flag in told.err
            assert f"ringserve.bench.{module} --help" in told.err


@pytest.mark.parametrize("module", MODULES)
def test_each_explains_itself(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"ringserve.bench.{module}").main()
    assert caught.value.code == 0
    assert f"usage: python -P -m ringserve.bench.{module}" in capsys.readouterr().out


def test_an_overview_takes_kept_results_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringserve.bench.overview import main

    (other := tmp_path / "other.json").write_text('{"summary": []}')
    for result, words in ((tmp_path / "nowhere.json", "No such file"), (other, "no result of these benchmarks")):
        monkeypatch.setattr(sys, "argv", ["overview", str(tmp_path / "picture.svg"), str(other), str(result)])
        with pytest.raises(OptionError, match=words):
            main()


@pytest.mark.parametrize(
    "arguments", [["--heads", "3", "--kv-heads", "2"], ["--dim", "8"], ["--dim", "40"], ["--page-size", "24"]]
)
def test_attention_takes_no_shape_that_it_cannot_compute(arguments: list[str]) -> None:
    from ringserve.bench.cpu_attention import main

    with pytest.raises(OptionError, match=arguments[0]):
        main(arguments)


def test_a_missing_model_is_one_line() -> None:
    command = [sys.executable, "-P", "-m", "ringserve.bench.accuracy", "--model", "/nowhere/model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ringserve: error: /nowhere/model: no such file or directory\n"


@pytest.mark.parametrize(("error", "status"), [(OptionError("--a: b"), 2), (ModelNotFound("c"), 1)])
def test_a_users_mistake_is_told(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_module(main)
    assert caught.value.code == status
    assert capsys.readouterr().err == f"ringserve: error: {error}\n"


def test_numbers() -> None:
    assert (at_least_one("1"), at_least_zero("0"), positive("0.5")) == (1, 0, 0.5)
    for text in ("inf", "nan", "0", "-0.1", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            positive(text)
