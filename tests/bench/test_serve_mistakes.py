"""``ringserve bench serve``: wrong options, datasets that are none, results that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_commands import SMALL, serve
from fake_openai import FakeOpenAI

from ringserve.cli import main


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


def test_a_dataset_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI() as server:
        assert serve(server.url, "--dataset", "azure", "--dataset-path", str(tmp_path / "absent.csv")) == 1
    assert "absent.csv: No such file" in capsys.readouterr().err
