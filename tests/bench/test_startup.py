"""``ringserve bench startup``, on a server that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_commands import read

from ringserve.cli import main


@pytest.mark.parametrize("extra", [(), ("--api", "completions")])
def test_startup(tmp_path: Path, command: str, extra: tuple[str, ...]) -> None:
    file = tmp_path / "result.json"
    assert main(["bench", "startup", "--command", command, "--runs", "2", "--json", str(file), *extra]) == 0
    result = read(file)
    assert len(result["runs"]) == 2
    for name in ("ready", "first_token"):
        assert set(result["summary"][name]) == {"p50", "p90", "p99"}
    assert all(0 < run["ready"] < run["first_token"] for run in result["runs"])
