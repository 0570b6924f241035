"""The commands end to end, on fake servers: tables, JSON, plots, exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_openai as fake
import pytest
from fake_openai import Behaviour, FakeOpenAI

import ringserve.bench
from ringserve.bench.busy import busy_processes
from ringserve.bench.processes import find_server
from ringserve.bench.server_command import free_port
from ringserve.cli import main

SAMPLES = Path(ringserve.bench.__file__).parent / "samples"
SMALL = ("--num-requests", "4", "--prompt-tokens", "5", "--output-tokens", "3", "--concurrency", "2")


def serve(url: str, *arguments: str) -> int:
    return main(["bench", "serve", "--url", url, *arguments])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    with FakeOpenAI() as server:
        status = serve(server.url, *SMALL, "--json", str(file), "--save-raw", "--goodput", "ttft:9000", "e2e:9000")
        assert len(server.calls) == 5  # one of them warms up
        assert len({tuple(call.body["prompt"]) for call in server.calls}) == 5
        assert server.calls[0].body["ignore_eos"] is True
        assert server.calls[0].body["temperature"] == 0.0
    assert status == 0
    out = capsys.readouterr().out
    for word in ("output tokens/s", "TTFT", "ITL", "TPOT", "E2E", "goodput", "p99"):
        assert word in out
    result = read(file)
    assert result["command"].startswith("ringserve bench serve --url")
    assert result["machine"]["ringserve"]
    assert result["server"]["model"] == "fake"
    (run,) = result["runs"]
    metrics = run["metrics"]
    assert (metrics["completed"], metrics["failed"], metrics["output_tokens"], metrics["prompt_tokens"]) == (
        4,
        0,
        12,
        20,
    )
    assert metrics["goodput"]["part"] == 1.0
    assert metrics["tokens_from"] == "usage"
    assert len(run["records"]) == 4
    assert all(len(record["chunk_times"]) == 3 for record in run["records"])
    assert run["system"]["client_cores"] > 0


@pytest.mark.parametrize("command", ["serve", "compare", "startup", "offline"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", command, "--help"])
    assert f"usage: ringserve bench {command}" in capsys.readouterr().out


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in ("serve", "compare", "startup", "offline"))


def test_the_same_seed_asks_the_same() -> None:
    prompts = []
    for seed in ("1", "1", "2"):
        with FakeOpenAI() as server:
            assert serve(server.url, *SMALL, "--seed", seed) == 0
            prompts.append([call.body["prompt"] for call in server.calls])
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert sorted(prompts[0]) != sorted(prompts[2])


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_sweep_and_its_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    picture, file = tmp_path / f"plot{suffix}", tmp_path / "result.json"
    rest = ("--num-requests", "4", "--output-tokens", "3", "--plot", str(picture), "--json", str(file))
    with FakeOpenAI() as server:
        assert serve(server.url, "--sweep", "concurrency=1,2", *rest) == 0
    assert picture.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert [run["point"]["concurrency"] for run in read(file)["runs"]] == [1, 2]
    assert capsys.readouterr().out.count("concurrency 2") == 2


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert serve("http://127.0.0.1:9", "--plot", "x.png") == 2
    assert "pip install 'ringserve[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api", "chat", "--turns", "2", "--num-requests", "2"),
        ("--dataset", "sharegpt", "--dataset-path", str(SAMPLES / "conversations.json"), "--output-tokens", "2"),
        ("--dataset", "mooncake", "--dataset-path", str(SAMPLES / "mooncake.jsonl"), "--trace-speed", "1000"),
        ("--dataset", "azure", "--dataset-path", str(SAMPLES / "azure.csv"), "--trace-speed", "1000"),
        ("--rate", "200", "--burstiness", "0.5", "--num-requests", "6", "--output-tokens", "2"),
        ("--rate", "inf", "--num-requests", "6", "--output-tokens", "2", "--max-concurrency", "2"),
        ("--prefix-tokens", "9", "--num-prefixes", "2", "--duration", "0.2", "--output-tokens", "2"),
        ("--prompt-format", "text", "--prompt-tokens", "uniform:3:9", "--output-tokens", "lognormal:2:0.3"),
    ],
)
def test_loads(arguments: tuple[str, ...]) -> None:
    limits = ("--max-prompt-tokens", "40", "--max-output-tokens", "3")
    with FakeOpenAI() as server:
        assert serve(server.url, *arguments, *limits) == 0
        assert len(server.calls) > 2
        if "mooncake" in arguments:
            assert len(server.calls) == 49
            assert max(len(call.body["prompt"]) for call in server.calls) == 40


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--concurrency", "0"), "--concurrency: 0 is below 1"),
        (("--concurrency", "1", "--rate", "1"), "exclude each other"),
        (("--rate", "-1"), "--rate"),
        (("--sweep", "speed=1"), "--sweep"),
        (("--sweep", "concurrency=1.5"), "--sweep"),
        (("--prompt-tokens", "many"), "--prompt-tokens"),
        (("--goodput", "tftf:2"), "--goodput"),
        (("--dataset", "azure"), "--dataset-path"),
        (("--extra-body", "[]"), "--extra-body"),
        (("--token-ids", "9:3"), "--token-ids"),
        (("--api", "chat", "--prompt-format", "ids"), "--prompt-format"),
        (("--json", "/nowhere/x.json"), "--json"),
        (("--plot", "x.gif"), "--plot"),
        (("--url", "ftp://x"), "--url"),
        (("--url", "http://a..b"), "--url"),
        (("--json", "/"), "--json"),
        (("--plot", "/proc/self/x.svg/"), "--plot"),
        (("--save-raw",), "--save-raw"),
        (("--server-pid", "0"), "--server-pid"),
        (("--wait", "nan"), "--wait"),
        (("--ramp", "nan"), "--ramp"),
        (("--ramp", "inf"), "--ramp"),
        (("--think-time", "nan"), "--think-time"),
        (("--burstiness", "inf"), "--burstiness"),
        (("--burstiness", "1e-300"), "--burstiness"),
        (("--temperature", "nan"), "--temperature"),
        (("--goodput", "ttft:inf"), "--goodput"),
        (("--goodput", "ttft:1", "ttft:2"), "--goodput"),
        (("--prompt-tokens", "lognormal:200:1000"), "--prompt-tokens"),
        (("--prompt-tokens", "normal:1e300:1e300"), "--prompt-tokens"),
        (("--extra-body", '{"stop": "\\ud800"}'), "--extra-body"),
        (("--extra-body", '{"seed": NaN}'), "--extra-body"),
        (("--extra-body", "[" * 100_000), "--extra-body"),
        (("--dataset-path", "x.json"), "--dataset-path"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert words in capsys.readouterr().err


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


def test_names_are_neither_markup_nor_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("[/x]", "[bold]", "$\\nope$")
    with FakeOpenAI(model="$\\nope$") as server:
        servers = [word for name in names for word in ("--server", f"{name}={server.url}")]
        load = ("--rounds", "1", "--num-requests", "2", "--output-tokens", "3")
        assert main(["bench", "compare", *servers, *load, "--plot", str(tmp_path / "x.svg")]) == 0
        assert serve(server.url, *SMALL, "--plot", str(tmp_path / "y.svg")) == 0
    table = capsys.readouterr().out.partition("medians")[2]
    assert all(name in table for name in names)


@pytest.mark.parametrize("key", ["\u2014", "a\r\nX: y"])
@pytest.mark.parametrize("command", ["serve", "compare"])
def test_a_key_that_is_no_header(command: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", command, "--api-key", key])
    assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_result_that_cannot_be_written_after_all(
    flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    full = Path("/dev/full")
    if flag == "--plot":
        (full := tmp_path / "plot.svg").symlink_to("/dev/full")
    with FakeOpenAI() as server:
        assert serve(server.url, *SMALL, flag, str(full)) == 2
    printed = capsys.readouterr()
    assert "output tokens/s" in printed.out
    assert f"{flag}: {full}: No space left on device" in printed.err


def test_an_infinite_rate_is_kept(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        assert serve(server.url, "--rate", "inf", "--num-requests", "2", "--json", str(tmp_path / "x.json")) == 0
    (run,) = read(tmp_path / "x.json")["runs"]
    assert run["point"] == {"concurrency": None, "rate": "inf"}


def test_halves_of_surrogate_pairs_are_sent_as_question_marks(tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    said = [{"from": "human", "value": "One \ud83d two"}, {"from": "gpt", "value": "Three \udc00"}]
    file.write_text(json.dumps([{"conversations": said}]))
    with FakeOpenAI() as server:
        arguments = ("--dataset", "sharegpt", "--dataset-path", str(file), "--num-requests", "1")
        assert serve(server.url, *arguments) == 0
        assert server.calls[0].body["prompt"] == "One ? two"


@pytest.mark.parametrize(
    ("dataset", "content", "words"),
    [
        ("azure", f'TIMESTAMP,ContextTokens,GeneratedTokens\n"{"x" * 200_000}",1,2\n', "line 2: not CSV"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-1,2\n", "line 2"),
        ("mooncake", '{"timestamp": 0, "input_length": -5, "output_length": 3}', "line 1"),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1e300}', "line 1"),
        ("mooncake", "[" * 100_000, "line 1"),
        ("sharegpt", "[" * 100_000, "not JSON"),
    ],
)
def test_datasets_that_are_none(
    dataset: str, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data"
    file.write_text(content)
    with FakeOpenAI() as server:
        assert serve(server.url, "--dataset", dataset, "--dataset-path", str(file)) == 1
    assert words in capsys.readouterr().err


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


@pytest.mark.parametrize("arguments", [["startup", "--command"], ["compare", "--command"]])
@pytest.mark.parametrize("server", ['"open {port}', "server without a port"])
def test_commands_that_are_none(arguments: list[str], server: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = server if "startup" in arguments else f"a={server}"
    try:
        status: object = main(["bench", *arguments, given])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert "--command" in capsys.readouterr().err


def test_a_dataset_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI() as server:
        assert serve(server.url, "--dataset", "azure", "--dataset-path", str(tmp_path / "absent.csv")) == 1
    assert "absent.csv: No such file" in capsys.readouterr().err


def test_an_api_key_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with FakeOpenAI() as server:
        assert serve(server.url, *SMALL, "--json", str(file), "--api-key", "secret") == 0
        assert server.calls[0].headers["authorization"] == "Bearer secret"
    assert "secret" not in file.read_text()


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


SCRIPT = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "script"}]}).encode())
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = {"choices": [{"text": "x", "delta": {"content": "x"}, "finish_reason": "stop"}]}
        self.answer(b"data: " + json.dumps(chunk).encode() + b"\\n\\ndata: [DONE]\\n\\n")
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path: Path) -> str:
    script = tmp_path / "server.py"
    script.write_text(SCRIPT)
    return f"{sys.executable} {script} {{port}}"


HANGS = """
import http.server, json, os, pathlib, sys, threading
asked = pathlib.Path(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = json.dumps({"data": [{"id": "script"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        partial = asked.with_suffix(".partial")
        partial.write_text(str(os.getpid()))
        partial.rename(asked)
        threading.Event().wait()
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


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


@pytest.mark.parametrize("extra", [(), ("--api", "completions")])
def test_startup(tmp_path: Path, command: str, extra: tuple[str, ...]) -> None:
    file = tmp_path / "result.json"
    assert main(["bench", "startup", "--command", command, "--runs", "2", "--json", str(file), *extra]) == 0
    result = read(file)
    assert len(result["runs"]) == 2
    for name in ("ready", "first_token"):
        assert set(result["summary"][name]) == {"p50", "p90", "p99"}
    assert all(0 < run["ready"] < run["first_token"] for run in result["runs"])


def test_the_server_of_a_port_is_found(command: str) -> None:
    with subprocess.Popen([*command.replace("{port}", "0").split()[:2], "0"]) as process:
        try:
            port = 0
            while not port:  # the script took a free port; the kernel knows which
                port = _listening_port(process.pid)
            tree = find_server("127.0.0.1", port)
            assert tree is not None
            assert tree.root == process.pid
            assert tree.resident_bytes() > 1 << 20
            assert tree.cpu_seconds() >= 0.0
        finally:
            process.kill()
    assert find_server("127.0.0.1", port) is None
    assert find_server("nowhere.invalid", 80) is None


def _listening_port(pid: int) -> int:
    links = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
            return int(fields[1].rpartition(":")[2], 16)
    return 0


def _commands() -> str:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return " ".join(found)
