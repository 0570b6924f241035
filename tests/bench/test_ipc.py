"""bench ipc: every transport carries what it is given, figures are what they say, a whole run works."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from ringserve.bench import ipc, ipc_engine, ipc_report
from ringserve.bench.ipc_handlers import BATCH, HOPS, Content, first_message, handler
from ringserve.bench.ipc_links import LINKS, available
from ringserve.bench.ipc_live import LiveError, difference, evaluate, parse, quantile
from ringserve.bench.ipc_pair import Pair
from ringserve.bench.ipc_results import Latency, Rate, Results, with_ratios
from ringserve.bench.ipc_rounds import Measurement, Plan
from ringserve.bench.ipc_unix import Unframer, framed
from ringserve.options import OptionError


@pytest.mark.parametrize("transport", available())
def test_every_transport_measures(transport: str) -> None:
    """Small and large messages, one by one and in bursts; the answers come back."""
    pair = Pair(transport)
    try:
        for size in (64, 300_000):
            times = pair.latency(size, 5, 0.0)
            assert len(times) == 5
            assert all(0 < time < 5e6 for time in times)
        found = pair.throughput(1024, 500)
        assert found.messages_per_s > 0
        assert found.cpu_us > 0
        assert found.doorbells == 0 or transport in ("ring", "ring-spin", "socket")
        assert pair.use().context_switches > 0
    finally:
        pair.close()


@pytest.mark.parametrize("content", ["small", "engine"])
def test_the_six_hops(content: Content) -> None:
    path = ipc_engine.Path("ring", content)
    try:
        times, rate, doorbells = path.round_trips(40, 8)
    finally:
        path.close()
    assert len(times) == 40
    assert rate > 0
    assert 0 < doorbells <= 1


def test_each_process_decodes_what_the_one_before_sends() -> None:
    """The engine's own unions, in order, until the frontend has text for the whole batch."""
    target, data = "tokenizer", first_message("engine")(7)
    visited = []
    while target != "frontend":
        visited.append(target)
        target, data = handler("engine", target)(data)
    assert visited == ["tokenizer", "scheduler", "executor", "scheduler", "tokenizer"]
    assert len(visited) + 1 == HOPS
    assert data.count(b" token") == BATCH


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    ipc.add_arguments(parser)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "png")}
    arguments = ["--transports", "ring,mp.Pipe", "--rounds", "2", "--samples", "8", "--messages", "64"]
    arguments += ["--sizes", "64,200000", "--idle-seconds", "0", "--json", str(files["json"])]
    arguments += ["--markdown", str(files["markdown"]), "--plot", str(files["png"])]
    assert ipc.run(parser.parse_args(arguments), arguments) == 0
    written = json.loads(files["json"].read_text())
    assert written["command"].startswith("ringserve bench ipc --transports")
    families = {cell["family"] for cell in written["results"]["latencies"]}
    assert families == {"busy", "idle", "uvloop", "small", "engine"}
    assert all(len(cell["rounds_p50_us"]) == 2 for cell in written["results"]["latencies"])
    bounds = {bound["family"]: bound for bound in written["results"]["bounds"]}
    assert set(bounds) == {"small", "engine"}
    assert 0 < bounds["small"]["cpu_us"] < bounds["engine"]["cpu_us"]
    assert bounds["engine"]["ratio"] is None
    assert {cell["transport"] for cell in written["results"]["latencies"]} == {"ring", "mp.Pipe"}
    assert written["machine"]["cores"] > 0
    assert "| ring |" in files["markdown"].read_text()
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "Six hops" in shown
    assert "pyzmq was not measured" in shown


@pytest.mark.parametrize(
    "wrong",
    [
        ["--transports", "carrier-pigeon"],
        ["--families", "one-way,nonsense"],
        ["--sizes", "64,x"],
        ["--sizes", "1"],
        ["--rounds", "0"],
        ["--samples", "0"],
        ["--live", "ftp://x"],
        ["--live", "http://127.0.0.1:9", "--requests", "0"],
        ["--json", "/nonexistent/x.json"],
        ["--plot", "x.pdf"],
    ],
)
def test_mistakes_are_told_before_anything_runs(wrong: list[str]) -> None:
    parser = argparse.ArgumentParser()
    ipc.add_arguments(parser)
    with pytest.raises(OptionError):
        ipc.run(parser.parse_args(wrong), wrong)


def latency(transport: str, *rounds: float, family: str = "busy") -> Latency:
    return Latency(
        family=family,
        placement="unpinned",
        size=64,
        transport=transport,
        samples=len(rounds),
        p50_us=rounds[0],
        p99_us=rounds[0],
        p999_us=rounds[0],
        rounds_p50_us=rounds,
    )


def test_ratios_are_medians_of_rounds_and_targets_follow() -> None:
    rates = [
        Rate(
            family="throughput",
            placement="unpinned",
            size=64,
            transport=transport,
            per_s=1.0,
            cpu_us=1.0,
            doorbells=doorbells,
            rounds_per_s=(10.0, 20.0, 30.0),
            rounds_cpu_us=cpu,
        )
        for transport, doorbells, cpu in (("ring", 0.5, (1.0, 1.0, 1.0)), ("pyzmq", None, (2.0, 4.0, 5.0)))
    ]
    results = with_ratios(
        Results(latencies=[latency("ring", 1.0, 6.0, 2.0), latency("pyzmq", 10.0, 10.0, 10.0)], rates=rates)
    )
    by_name = {cell.transport: cell.ratio for cell in results.latencies}
    assert by_name == {"ring": 0.2, "pyzmq": 1.0}
    assert results.rates[0].cpu_ratio == 0.25
    targets = {target.what: target for target in results.targets}
    assert targets["64 B one way, unpinned, to pyzmq"].met
    assert not targets["doorbells per message, 64 B, saturated"].met
    assert targets["CPU per message, 64 B, to pyzmq"].met
    assert "0.20x" in ipc_report.markdown(results, "a machine")


def test_without_a_baseline_there_are_no_ratios() -> None:
    assert with_ratios(Results(latencies=[latency("ring", 1.0)])).latencies[0].ratio is None


def test_every_transport_of_the_plan_is_measured_in_every_round() -> None:
    plan = Plan(transports=("ring", "unix"), sizes=(64,), rounds=2, samples=4, families=("one-way",))
    results = Measurement(plan, lambda _step: None).run()
    cells = {(cell.family, cell.transport, cell.placement): len(cell.rounds_p50_us) for cell in results.latencies}
    assert set(cells.values()) == {2}
    assert {"ring", "unix"} == {transport for _, transport, _ in cells}
    assert ("idle", "ring", "unpinned") in cells


def test_streams_are_cut_into_messages_wherever_they_break() -> None:
    sent = [b"", b"abc", bytes(1000), b"x"]
    stream = framed(sent)
    for step in (1, 3, 7, len(stream)):
        unframer, got = Unframer(), []
        for start in range(0, len(stream), step):
            got += unframer.feed(stream[start : start + step])
        assert got == sent


def test_links_are_named_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    ipc.add_arguments(parser)
    assert all(name in parser.format_help() for name in LINKS)


# ------------------------------------------------------------------------------------------------------------ live

EXPOSITION = """
# TYPE ringserve_hop_seconds histogram
ringserve_hop_seconds_bucket{{hop="executor",le="0.001"}} {0}
ringserve_hop_seconds_bucket{{hop="executor",le="0.002"}} {1}
ringserve_hop_seconds_bucket{{hop="executor",le="+Inf"}} {1}
ringserve_hop_seconds_count{{hop="executor"}} {1}
ringserve_hop_seconds_sum{{hop="executor"}} {2}
ringserve_hop_seconds_bucket{{hop="scheduler",le="0.001"}} {1}
ringserve_hop_seconds_bucket{{hop="scheduler",le="0.002"}} {1}
ringserve_hop_seconds_bucket{{hop="scheduler",le="+Inf"}} {1}
ringserve_hop_seconds_count{{hop="scheduler"}} {1}
ringserve_hop_seconds_sum{{hop="scheduler"}} {3}
# TYPE ringserve_steps counter
ringserve_steps_total {1}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total {4}
# TYPE ringserve_ring_messages counter
ringserve_ring_messages_total{{ring="a>b"}} {1}
# TYPE ringserve_ring_bytes counter
ringserve_ring_bytes_total{{ring="a>b"}} {5}
# TYPE ringserve_ring_doorbells counter
ringserve_ring_doorbells_total{{ring="a>b"}} {0}
"""


def test_live_figures_are_differences() -> None:
    before = parse(EXPOSITION.format(5, 10, 0.5, 0.1, 100, 1000))
    after = parse(EXPOSITION.format(10, 20, 0.53, 0.11, 140, 5000))
    live = evaluate(difference(before, after))
    assert (live.tokens, live.steps) == (40, 10)
    executor, scheduler = live.hops
    assert (executor.name, executor.count) == ("executor", 10)
    assert math.isclose(executor.mean_us, 3000)
    assert math.isclose(executor.p50_us, 1000)
    assert math.isclose(executor.p99_us, 1980)
    assert math.isclose(scheduler.mean_us, 1000)
    assert math.isclose(live.outside_executor, 0.25)
    (ring,) = live.rings
    assert (ring.messages, ring.bytes, ring.doorbells) == (10, 4000, 5)
    assert (live.messages_per_token, live.bytes_per_token, live.doorbells_per_message) == (0.25, 100.0, 0.5)


def test_live_needs_a_ringserve() -> None:
    with pytest.raises(LiveError):
        evaluate(parse("# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total 5\n"))


def test_quantiles_of_buckets() -> None:
    buckets = {1.0: 10.0, 2.0: 10.0, 4.0: 20.0, math.inf: 21.0}
    assert quantile(buckets, 0.25) == pytest.approx(0.525)
    assert quantile(buckets, 0.75) == pytest.approx(2 + 2 * 5.75 / 10)
    assert quantile(buckets, 0.99) == 4.0
    assert quantile({}, 0.5) == 0.0
    assert quantile({1.0: 0.0, math.inf: 0.0}, 0.5) == 0.0
