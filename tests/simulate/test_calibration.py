"""The calibration's arithmetic on made-up streams, and the whole of it on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_process import Server
from tiny_model import save_tiny_model

from ringserve.bench.measure import ServerUnusable
from ringserve.bench.records import RequestRecord
from ringserve.cli import main
from ringserve.engine.step_time import StepShape
from ringserve.frontend.metrics import Metrics
from ringserve.messages.sampling import SamplingDefaults
from ringserve.messages.startup import ExecutorReady
from ringserve.simulate.calibration import DecodeProbe, PromptProbe, decode_sample, plan, read_engine
from ringserve.simulate.step_time import Engine


def stream(first: float, step: float, tokens: int) -> RequestRecord:
    times = [first + step * index for index in range(tokens)]
    return RequestRecord(due=0.0, sent=0.0, chunk_times=times, chunk_tokens=[1] * tokens, ended=times[-1])


def test_a_decode_sample_is_of_where_all_streams_overlap() -> None:
    sample = decode_sample(DecodeProbe(2, 100), [stream(1.0, 0.5, 20), stream(3.0, 0.5, 20)])
    # from 3.0 to 10.5: 15 steps, before which the first stream had 4 tokens
    assert sample.shapes == (StepShape(2, 2, 0, (100 + 4 + 8) + (100 + 0 + 8), 0),)
    assert sample.seconds == pytest.approx(0.5)
    assert not sample.with_overhead


def test_chunks_of_several_tokens_are_several_steps() -> None:
    record = RequestRecord(due=0.0, sent=0.0, chunk_times=[1.0, 2.0, 4.0, 5.0], chunk_tokens=[1, 1, 2, 1], ended=5.0)
    assert decode_sample(DecodeProbe(1, 10), [record]).seconds == pytest.approx(1.0)


def test_streams_that_do_not_overlap_say_so() -> None:
    with pytest.raises(ServerUnusable, match="did not overlap"):
        decode_sample(DecodeProbe(2, 100), [stream(1.0, 0.5, 4), stream(30.0, 0.5, 4)])


@pytest.mark.parametrize(
    "engine", [Engine(2912, 64, 64, 256, 8192), Engine(33, 16, 64, 256, 512), Engine(64, 8, 1, 16, 256)]
)
def test_every_probe_fits_the_engine(engine: Engine) -> None:
    probes = list(plan(engine))
    assert {type(probe) for probe in probes} == {DecodeProbe, PromptProbe}
    for probe in probes:
        assert 1 <= probe.prompt_tokens < engine.max_model_len
        assert getattr(probe, "sequences", 1) * probe.prompt_tokens < engine.num_pages * engine.page_size
        assert getattr(probe, "sequences", 1) <= engine.max_num_seqs
    assert len(set(probes)) == len(probes)


def test_the_engine_is_read_from_the_metrics() -> None:
    metrics = Metrics("m", "1")
    with pytest.raises(ServerUnusable, match="only a ringserve"):
        read_engine(metrics.render().decode())
    ready = ExecutorReady(100, 512, b"", 77, 16, 8, 64, "f", "f", "cpu", "Llama", SamplingDefaults())
    metrics.on_ready(ready)
    assert read_engine(metrics.render().decode()) == Engine(77, 16, 8, 64, 512)


# Measures a server: what else computes beside it decides whether that can be done.
@pytest.mark.slow_all
def test_a_real_server_is_calibrated_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    kept, result = tmp_path / "step.json", tmp_path / "result.json"
    load = [
        "--token-ids",
        "3:250",
        "--concurrency",
        "4",
        "--num-requests",
        "12",
        "--prompt-tokens",
        "30",
        "--output-tokens",
        "uniform:2:20",
    ]
    with Server(str(model), "--threads", "1", "--max-num-seqs", "8", "--dtype", "float32") as server:
        there = ("--calibrate", server.url, "--save-step-time", str(kept), "--against", server.url)
        assert main(["simulate", *there, *load, "--json", str(result)]) == 0
        assert server.stop() == 0, server.output()
    out = capsys.readouterr().out
    assert "simulated / measured" in out
    found = json.loads(result.read_text())
    assert found["engine"] == json.loads(kept.read_text())["engine"]
    assert found["engine"]["max_num_seqs"] == 8
    (against,) = found["against"]
    simulated, measured = against["simulated"], against["measured"]["metrics"]
    for name in ("completed", "prompt_tokens", "output_tokens"):
        assert simulated[name] == measured[name] > 0
    assert main(["simulate", "--step-time", str(kept), *load]) == 0
