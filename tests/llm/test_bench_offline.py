"""``ringserve bench offline``: its figures from hand-made rounds, its options, and one small run of both sides."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tiny_model import save_tiny_model

from ringserve.bench.measure import ServerUnusable
from ringserve.bench.offline import Load, add_arguments, run
from ringserve.bench.offline_results import Round, Side, summarize
from ringserve.bench.offline_sides import Server
from ringserve.bench.prompts import TokenIds
from ringserve.options import OptionError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def side(rate: float, hop: float = 0.0) -> Side:
    return Side(2.0, rate, 100.0, None, {"client": 0.01, "executor": rate * 1e-3}, {"executor": hop} if hop else {})


def test_medians_and_ratios_of_rounds() -> None:
    rounds = [
        Round(8, number, side(100.0), side(served, 50.0 + number), 0.0)
        for number, served in enumerate((80.0, 95.0, 90.0))
    ]
    (row,) = summarize(rounds)
    assert (row.num_requests, row.offline_tokens_per_s, row.serving_tokens_per_s) == (8, 100.0, 90.0)
    assert (row.ratio, row.ratio_low, row.ratio_high) == (0.9, 0.8, 0.95)
    assert row.hops_us == {"executor": 51.0}
    assert row.ttft_ms_p50 == {"offline": 100.0, "serving": 100.0}
    assert row.tpot_ms_p50 == {}
    assert row.offline_cpu_ms_per_token == pytest.approx({"client": 0.05, "executor": 0.5})


def test_without_serving_there_is_no_ratio() -> None:
    first, second = summarize([Round(8, 0, side(10.0), None, 0.0), Round(2, 0, side(5.0), None, 0.0)])
    assert (first.num_requests, second.num_requests) == (8, 2)
    assert first.ratio is first.serving_tokens_per_s is None
    assert first.serving_cpu_ms_per_token == {}


def test_a_server_that_is_gone_is_told() -> None:
    """Ended while the other side had its turn."""
    server = Server(None, {"zebra": 1})
    server._server._process.wait()
    with pytest.raises(ServerUnusable, match="--zebra"):
        server.ask([[1]], 2)
    server.__exit__()


def test_prompts_are_seeded() -> None:
    load = Load(prompt_tokens=5, output_tokens=1, seed=3, ids=TokenIds(10, 20))
    prompts = load.prompts("a", 4)
    assert prompts == load.prompts("a", 4)
    assert prompts != load.prompts("b", 4)
    assert all(len(prompt) == 5 and all(10 <= each < 20 for each in prompt) for prompt in prompts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--num-requests", "8,x"), "--num-requests: '8,x' is not a list"),
        (("--num-requests", "0"), "--num-requests: 0 is below 1"),
        (("--rounds", "0"), "--rounds: 0 is below 1"),
        (("--json", "/no/such/place/x.json"), "--json: .* no such directory"),
        (("--dtype", "float16"), "dtype: 'float16' is not one of"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        run(parse(*arguments))


@pytest.mark.slow
def test_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, kept = save_tiny_model(tmp_path), tmp_path / "kept.json"
    given = parse(
        str(model), "--num-requests", "1,2", "--prompt-tokens", "8", "--output-tokens", "4", "--rounds", "2",
        "--threads", "1", "--against-serving", "--json", str(kept),
    )  # fmt: skip
    assert run(given) == 0
    result = json.loads(kept.read_text())
    assert result["command"].startswith(f"ringserve bench offline {model} --num-requests 1,2 ")
    assert [row["num_requests"] for row in result["summary"]] == [1, 2]
    assert len(result["rounds"]) == 4
    for one in result["rounds"]:
        assert set(one["offline"]["cpu_seconds"]) == {"client", "tokenizer-0", "scheduler", "executor"}
        assert set(one["serving"]["cpu_seconds"]) == {
            "client", "supervisor", "frontend-0", "tokenizer-0", "scheduler", "executor",
        }  # fmt: skip
        assert "executor" in one["serving"]["hops_us"]
    assert "serving / offline" in capsys.readouterr().out
