"""Signals: what there is is reported, and no server that was started stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_openai as fake
import pytest
from bench_commands import serve
from fake_openai import FakeOpenAI
from script_servers import HANGS


def test_ctrl_c_reports_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(fake.good, fake.good, fake.hang) as server:

        def interrupt() -> None:
            while len(server.calls) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        assert serve(server.url, "--concurrency", "1", "--num-requests", "9", "--output-tokens", "2") == 130
        thread.join()
    out = capsys.readouterr().out
    assert "stopped by the user" in out
    assert "requests interrupted" in out


def test_ctrl_c_while_requests_are_prepared(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI() as server:
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        started = time.perf_counter()
        assert serve(server.url, "--num-requests", "200000") == 130  # half a minute and a gigabyte
        assert time.perf_counter() - started < 8
        timer.join()
        assert server.calls == []


@pytest.mark.parametrize(
    ("number", "in_background"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGTERM, True)],
)
@pytest.mark.parametrize("name", ["compare", "startup"])
def test_whatever_ends_it_ends_the_servers_it_started(
    tmp_path: Path, name: str, number: signal.Signals, in_background: bool
) -> None:
    script, asked = tmp_path / "server.py", tmp_path / "asked"
    script.write_text(HANGS)
    server = f"{sys.executable} {script} {{port}} {asked}"
    arguments = [sys.executable, "-P", "-m", "ringserve", "bench", name]
    if name == "compare":
        arguments += ["--command", f"one={server}", "--command", f"two={server}"]
    else:
        arguments += ["--command", server]
    # Shells start the background jobs of a script with SIGINT ignored.
    given = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_background else None
    try:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    finally:
        if in_background:
            signal.signal(signal.SIGINT, given)
    with process:
        while not asked.exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(asked.read_text()), 0)
