"""The command: what it prints and keeps, and what it says to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringserve.cli import main

SMALL = ["--step-time", "linear:10:1", "--num-requests", "30", "--prompt-tokens", "50", "--output-tokens", "8"]


def test_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, picture = tmp_path / "result.json", tmp_path / "picture.svg"
    words = [
        "--rate",
        "inf",
        "--policies",
        "fcfs,priority,fair",
        "--tenants",
        "crowd=9,one=1",
        "--tenant-priorities",
        "one=-5",
    ]
    limits = ["--max-num-seqs", "4", "--goodput", "ttft:900", "e2e:5000"]
    status = main(["simulate", *SMALL, *words, *limits, "--json", str(result), "--plot", str(picture)])
    assert status == 0
    out = capsys.readouterr().out
    for word in ("fcfs", "priority", "fair", "TTFT p99", "goodput", "preemptions", "tenants, fair", "share while all"):
        assert word in out
    found = json.loads(result.read_text())
    assert found["command"].startswith("ringserve simulate --step-time linear:10:1")
    runs = {run["policy"]: run for run in found["runs"]}
    assert {run["completed"] for run in runs.values()} == {30}
    waits = {
        policy: next(tenant["ttft_ms"]["mean"] for tenant in run["tenants"] if tenant["tenant"] == "one")
        for policy, run in runs.items()
    }
    assert waits["priority"] < waits["fcfs"]
    assert waits["fair"] < waits["fcfs"]
    assert picture.read_text().startswith("<?xml")


def test_a_sweep_and_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sweep", "concurrency=1,4", "--goodput", "ttft:500", "--find-rate", "0.9"]
    assert main(["simulate", *SMALL, *words, "--plot", str(tmp_path / "picture.png")]) == 0
    out = capsys.readouterr().out
    for word in ("concurrency 1", "concurrency 4", "highest rate", "90.0% of the requests"):
        assert word in out


def test_conversations_and_a_sharegpt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--turns", "3", "--concurrency", "2", "--json", str(tmp_path / "r.json")]) == 0
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert run["completed"] == 90
    assert run["cached_tokens"] > 0
    talk = [{"conversations": [{"from": "human", "value": "Hello " * 40}, {"from": "gpt", "value": "Good day " * 9}]}]
    (tmp_path / "talks.json").write_text(json.dumps(talk))
    words = ["--dataset", "sharegpt", "--dataset-path", str(tmp_path / "talks.json")]
    assert main(["simulate", "--step-time", "linear:1:1", "--num-requests", "4", *words]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give one of --step-time and --calibrate"),
        ("--step-time linear:1:1 --calibrate http://127.0.0.1:1", "give one of"),
        ("--step-time nowhere.json", "No such file"),
        ("--step-time linear:1:1 --save-step-time x.json", "keeps what --calibrate fits"),
        ("--step-time linear:1:1 --policies fcfs,lifo", "'lifo' is not one of fcfs"),
        ("--step-time linear:1:1 --find-rate 0.9", "needs --goodput"),
        ("--step-time linear:1:1 --find-rate 2 --goodput ttft:1", "--find-rate"),
        ("--step-time linear:1:1 --tenants a", "not of the form NAME=NUMBER"),
        ("--step-time linear:1:1 --tenants a=0", "not above 0"),
        ("--step-time linear:1:1 --tenant-priorities b=1", "not one of --tenants"),
        ("--step-time linear:1:1 --tenants b=1 --tenant-priorities b=0.5", "whole number"),
        ("--step-time linear:1:1 --tenants b=1 --tenant-deadlines b=-1", "below 0"),
        ("--step-time linear:1:1 --kv-cache-tokens 10", "below a page"),
        ("--step-time linear:1:1 --block-size 0", "--block-size: 0 is below 1"),
        ("--step-time linear:1:1 --max-num-seqs 0", "--max-num-seqs"),
        ("--step-time linear:1:1 --rate 0", "--rate"),
        ("--step-time linear:1:1 --rate inf --duration 5", "--num-requests"),
        ("--step-time linear:1:1 --duration inf", "--duration: inf seconds"),
        ("--step-time linear:1:1 --think-time 1e300", "--think-time"),
        ("--step-time linear:1:1 --rate 1e-300", "--rate: below"),
        ("--step-time linear:1:1 --sweep rate=1,inf --duration 5", "--num-requests"),
        ("--step-time linear:1:1 --max-model-len 9000000000", "too many to be simulated"),
        ("--step-time linear:1:1 --turns 2 --token-ids x", "--token-ids"),
        ("--calibrate http://127.0.0.1:1 --dataset sharegpt --dataset-path x --token-ids 7:7", "--token-ids"),
        ("--step-time linear:1:1 --against ftp://x", "--against"),
        ("--step-time linear:1:1 --against http://x --tenants a=1", "no tenants"),
    ],
)
def test_mistakes_are_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_unknown_option_and_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--bogus"])
    err = capsys.readouterr().err
    assert "--bogus" in err
    assert len(err.splitlines()) == 1
    assert main(["simulate", "--calibrate", "http://127.0.0.1:1"]) == 1
    assert "connection refused" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--help"])
    assert "usage: ringserve simulate" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "simulate" in capsys.readouterr().out


def test_other_commands_do_not_load_it() -> None:
    code = "import sys, ringserve.cli; ringserve.cli.build_parser(); print('ringserve.simulate.command' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout == "False\n"
