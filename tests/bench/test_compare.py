"""``ringserve bench compare`` on fake servers and on servers that it starts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_openai as fake
import pytest
from bench_commands import SMALL, read
from fake_openai import FakeOpenAI

from ringserve.bench.busy import busy_processes
from ringserve.cli import main


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "plot.svg"
    with FakeOpenAI(model="a") as one, FakeOpenAI(fake.pairs, model="b") as two:
        servers = ["--server", f"one={one.url}", "--server", f"two={two.url}", "--rounds", "2"]
        load = ["--sweep", "concurrency=1,2", "--num-requests", "3", "--output-tokens", "4"]
        status = main(["bench", "compare", *servers, *load, "--json", str(file), "--plot", str(picture)])
        sent = [sorted(tuple(call.body["prompt"]) for call in server.calls) for server in (one, two)]
    assert status == 0
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 16  # rounds and points have requests of their own
    assert picture.exists()
    result = read(file)
    assert [(run["server"], run["round"], run["run"]["point"]["concurrency"]) for run in result["runs"]] == [
        (server, number, at) for number in (0, 1) for at in (1, 2) for server in ("one", "two")
    ]
    first, second = result["summary"][:2]
    assert first["ratios"]["output_tokens_per_s"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    ratio = second["ratios"]["output_tokens_per_s"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert "one" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [(), ("--one-at-a-time",)])
def test_compare_starts_and_ends_servers(tmp_path: Path, command: str, extra: tuple[str, ...]) -> None:
    file = tmp_path / "result.json"
    arguments = ["--command", f"a={command}", "--command", f"b={command}", "--rounds", "2", "--json", str(file), *extra]
    assert main(["bench", "compare", *arguments, *SMALL]) == 0
    for one in read(file)["runs"]:
        assert one["run"]["metrics"]["completed"] == 4
        assert one["run"]["metrics"]["tokens_from"] == "chunks"
        assert one["run"]["system"]["server_peak_resident_bytes"] > 1 << 20
    assert str(tmp_path / "server.py") not in _commands()


def test_compare_tells_why_a_server_did_not_start(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken = f"{sys.executable} -c 'print(\"no such model\"); raise SystemExit(3)' {{port}}"
    assert main(["bench", "compare", "--command", f"a={command}", "--command", f"b={broken}", *SMALL]) == 1
    err = capsys.readouterr().err
    assert "b: the server ended with status 3" in err
    assert "no such model" in err


def test_compare_beside_busy_processes(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there while a server is measured, and at no other time."""
    counts: list[int] = []

    @contextlib.contextmanager
    def recorded(count: int) -> Iterator[list[int]]:
        with busy_processes(count) as pids:
            counts.append(len(pids))
            yield pids

    monkeypatch.setattr("ringserve.bench.compare.busy_processes", recorded)
    arguments = ["--command", f"a={command}", "--command", f"b={command}", "--rounds", "1", "--busy", "1"]
    assert main(["bench", "compare", *arguments, *SMALL]) == 0
    assert counts == [1, 1]
    assert main(["bench", "compare", *arguments[:4], "--busy", "-1"]) == 2


def test_compare_needs_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", "--server", "a=http://127.0.0.1:9"]) == 2
    assert "two or more servers" in capsys.readouterr().err


def _commands() -> str:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return " ".join(found)
