"""``ringserve bench serve`` where the server, or the machine, does not do its part: the figures tell the truth."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import fake_openai as fake
import pytest
from bench_commands import SMALL, read, serve
from fake_openai import Behaviour, FakeOpenAI

from ringserve.bench.server_command import free_port


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (fake.hang, "timeout"),
        (fake.reset, "connection_reset"),
        (fake.malformed, "malformed"),
        (fake.overloaded, "http_503"),
        (fake.cut, "truncated"),
    ],
)
def test_bad_servers_end_with_the_truth(behaviour: Behaviour, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(behaviour) as server:
        assert serve(server.url, *SMALL, "--timeout", "0.3") == 1
    assert f"{kind}: 4 x, first: " in capsys.readouterr().out


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI() as server:
        url = server.url
    assert serve(url, *SMALL) == 1
    assert "connection refused" in capsys.readouterr().err
    assert serve(url, *SMALL, "--model", "fake") == 1
    assert "connection_refused: 4 x" in capsys.readouterr().out


def test_more_connections_than_descriptors(tmp_path: Path) -> None:
    """What cannot be opened is an error of its request; the figures are there all the same."""
    file = tmp_path / "result.json"
    load = ("--rate", "inf", "--num-requests", "60", "--output-tokens", "2", "--prompt-tokens", "2")
    limited = (
        "import resource, sys; from ringserve.cli import main; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); sys.exit(main(sys.argv[1:]))"
    )
    with FakeOpenAI() as server:
        arguments = ["bench", "serve", "--url", server.url, *load, "--json", str(file)]
        done = subprocess.run([sys.executable, "-P", "-c", limited, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (run,) = read(file)["runs"]
    assert run["metrics"]["completed"] > 0
    assert [error["kind"] for error in run["metrics"]["errors"]] == ["connection_failed"]
    assert "Too many open files" in run["metrics"]["errors"][0]["first_message"]


def test_the_soft_limit_of_descriptors_does_not_bound_the_load(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 70, limits[1]))
    try:
        with FakeOpenAI() as server:
            load = ("--rate", "inf", "--num-requests", "60", "--output-tokens", "2", "--prompt-tokens", "2")
            assert serve(server.url, *load, "--json", str(tmp_path / "x.json")) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (run,) = read(tmp_path / "x.json")["runs"]
    assert run["metrics"]["failed"] == 0


def test_a_server_that_is_killed_meanwhile(tmp_path: Path, command: str) -> None:
    """Its use is what was seen of it, not what is missing afterwards."""
    file = tmp_path / "result.json"
    port = free_port()
    with subprocess.Popen([*command.split()[:2], str(port)]) as process:
        killer = threading.Timer(3.0, process.kill)
        killer.start()
        load = ("--duration", "4", "--concurrency", "2", "--output-tokens", "2", "--prompt-tokens", "4")
        assert serve(f"http://127.0.0.1:{port}", "--wait", "20", *load, "--json", str(file)) == 0
        killer.join()
    (run,) = read(file)["runs"]
    assert run["system"]["server_ended"] is True
    assert run["system"]["server_cpu_seconds"] > 0
    assert run["system"]["server_peak_resident_bytes"] > 1 << 20
