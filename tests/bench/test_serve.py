"""``ringserve bench serve`` on fake servers: loads, tables, JSON, plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_commands import SMALL, read, serve
from fake_openai import FakeOpenAI

import ringserve.bench

SAMPLES = Path(ringserve.bench.__file__).parent / "samples"


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


def test_an_api_key_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with FakeOpenAI() as server:
        assert serve(server.url, *SMALL, "--json", str(file), "--api-key", "secret") == 0
        assert server.calls[0].headers["authorization"] == "Bearer secret"
    assert "secret" not in file.read_text()
