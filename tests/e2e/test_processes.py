"""The server as seen from outside: what it maps, what it does when idle, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_process import ROLES, Server, ServerFailed, descendants, wait_for_end

MODEL = "SmolLM2-135M-Instruct"


def complete(url: str, max_tokens: int = 8, **more: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def context_switches(pid: int) -> int:
    """Voluntary and involuntary switches of all threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                total += int(line.split()[1])
    return total


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_only_the_executor_maps_libtorch(server: Server) -> None:
    assert complete(server.url).status_code == 200
    pids = server.pids
    assert set(pids) == set(ROLES)
    mapped = {
        role: {word for word in ("libtorch", "cupy", "triton") if word in Path(f"/proc/{pid}/maps").read_text()}
        for role, pid in {**pids, "supervisor": server.process.pid}.items()
    }
    assert "libtorch" in mapped.pop("executor")
    assert mapped == {"supervisor": set(), "frontend-0": set(), "tokenizer-0": set(), "scheduler": set()}


def test_an_idle_server_sleeps(server: Server) -> None:
    """No timers, no polling: nothing is switched to while nothing is asked."""
    assert complete(server.url).status_code == 200
    everybody = {**server.pids, "supervisor": server.process.pid}
    time.sleep(3)  # thread pools of libraries go to sleep, the client's connection is closed
    before = {role: (context_switches(pid), cpu_ticks(pid)) for role, pid in everybody.items()}
    seconds = 10
    time.sleep(seconds)
    switches = {role: context_switches(pid) - before[role][0] for role, pid in everybody.items()}
    ticks = sum(cpu_ticks(pid) - before[role][1] for role, pid in everybody.items())
    assert switches == dict.fromkeys(everybody, 0)
    assert ticks < 0.01 * seconds * os.sysconf("SC_CLK_TCK")


def test_sigterm_finishes_what_runs() -> None:
    with Server("--max-model-len", "512") as server:
        everybody = [server.process.pid, *descendants(server.process.pid)]
        answers: list[httpx.Response] = []
        started = threading.Event()

        def ask() -> None:
            with httpx.stream(
                "POST",
                f"{server.url}/v1/completions",
                json={"model": MODEL, "prompt": "One", "max_tokens": 60, "stream": True, "ignore_eos": True},
                timeout=120,
            ) as response:
                for line in response.iter_lines():
                    if line:
                        started.set()
                        lines.append(line)
                answers.append(response)

        lines: list[str] = []
        client = threading.Thread(target=ask)
        client.start()
        assert started.wait(60)
        assert server.stop() == 0, server.output()
        client.join()
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        assert wait_for_end(everybody) == []
        assert "Traceback" not in server.output()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_every_process_is_one_signal(signum: signal.Signals) -> None:
    """Service managers and terminals send it to the whole group."""
    with Server("--max-model-len", "512") as server:
        everybody = [server.process.pid, *descendants(server.process.pid)]
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"model": MODEL, "prompt": "One", "max_tokens": 40, "stream": True, "ignore_eos": True},
            timeout=120,
        ) as response:
            lines = response.iter_lines()
            next(lines)
            for pid in [*server.pids.values(), server.process.pid]:
                os.kill(pid, signum)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(60) == 0, server.output()
        assert wait_for_end(everybody) == []


def test_a_second_signal_stops_at_once() -> None:
    with Server("--max-model-len", "4096") as server:
        everybody = [server.process.pid, *descendants(server.process.pid)]
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"model": MODEL, "prompt": "One", "max_tokens": 4000, "stream": True, "ignore_eos": True},
            timeout=120,
        ) as response:
            lines = response.iter_lines()  # kept: a dropped generator closes the connection
            next(lines)
            server.process.send_signal(signal.SIGINT)
            while "stopping:" not in server.output():
                time.sleep(0.02)
            assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
        assert wait_for_end(everybody) == []


@pytest.mark.parametrize("victim", [*ROLES, "supervisor"])
def test_a_killed_process_takes_the_server_down_and_leaves_nothing(victim: str) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    with Server("--max-model-len", "512") as server:
        assert complete(server.url).status_code == 200
        everybody = [server.process.pid, *descendants(server.process.pid)]
        address = ("127.0.0.1", httpx.URL(server.url).port or 0)
        pid = server.process.pid if victim == "supervisor" else server.pids[victim]
        os.kill(pid, signal.SIGKILL)
        status = server.process.wait(30)
        assert wait_for_end(everybody) == []
        if victim == "supervisor":
            assert status == -signal.SIGKILL
        else:
            assert status == 1
            (line,) = [line for line in server.output().splitlines() if line.startswith("ringserve: error:")]
            assert f"the {victim} process (pid {pid}) was killed by SIGKILL" in line
        assert "Traceback" not in server.output()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address).close()
    assert set(os.listdir("/dev/shm")) == shared_before


def test_open_streams_are_told_when_the_executor_dies() -> None:
    with Server("--max-model-len", "4096") as server:
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"model": MODEL, "prompt": "One", "max_tokens": 4000, "stream": True, "ignore_eos": True},
            timeout=120,
        ) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.pids["executor"], signal.SIGKILL)
            rest = [line for line in lines if line]
        assert '"error"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(30) == 1


def test_a_signal_while_loading_ends_it() -> None:
    with Server("--max-model-len", "512", wait=False) as server:
        while len(server.pids) < len(ROLES):
            time.sleep(0.02)
        everybody = [server.process.pid, *descendants(server.process.pid)]
        assert server.stop() == 0
        assert wait_for_end(everybody) == []


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerFailed) as caught:
            Server("--config", "/dev/null", port=port)
    errors = [line for line in str(caught.value).splitlines() if line.startswith("ringserve: error:")]
    assert len(errors) == 1
    assert str(port) in errors[0]
    assert "--port" in errors[0]
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-model-len", "1000000"), "max-model-len"),
        (("--max-model-len", "8192", "--kv-cache-memory", "1M"), "kv-cache-memory"),
        (("--quantization", "fp8", "--device", "cpu"), "--quantization fp8 is for GPUs"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ServerFailed) as caught:
        Server(*arguments)
    errors = [line for line in str(caught.value).splitlines() if line.startswith("ringserve: error:")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in str(caught.value)


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for a machine that has one
    result = subprocess.run(
        [sys.executable, "-P", "-m", "ringserve", "serve", "--device", "cuda", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("ringserve: error:")]
    assert len(errors) == 1
    assert re.search(
        r"--device cuda: (there is no GPU here|torch .* is a build without CUDA|torch sees no GPU)", errors[0]
    )
    assert "Traceback" not in result.stderr
