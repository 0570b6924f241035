"""`ringserve.bench.cpu_step`: its parts add up, on a small model."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from fast_models import FAMILY

from ringserve.bench.cpu_step import main
from ringserve.engine.fast_decoder import FastDecoder
from ringserve.engine.model_runner import ModelRunner
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_steps_parts_add_up(tmp_path: Path, quantization: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_checkpoint(tmp_path / "small", *FAMILY["llama"])
    output = tmp_path / "step.json"
    options = ["--model", str(path), "--quantization", quantization, "--threads", "2", "--context", "40"]
    assert main([*options, "--batch", "1", "3", "--prompt", "50", "--steps", "3", "--output", str(output)]) == 0
    content = json.loads(output.read_text())
    assert [step["name"] for step in content["steps"]] == ["decode 1", "decode 3", "prompt 50"]
    assert all(rate > 1e8 for rate in content["roofs"].values())
    for step in content["steps"]:
        parts = {"linears", "output layer", "attention", "norms", "sampling", "python"}
        assert set(step["share"]) == parts
        assert all(value > 0 for value in step["milliseconds"].values())
        assert all(value > 0 for value in step["of_roof"].values())
    assert "GB/s" in capsys.readouterr().out


def test_reading_the_clocks_is_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as Python does in a whole step, and would be shown as that."""
    execute, read = ModelRunner.execute, FastDecoder.operation_times
    events: list[str] = []

    def noted_execute(runner: ModelRunner, output: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput:
        events.append("begin")
        result = execute(runner, output, received_ns)
        events.append("end")
        return result

    def noted_read(decoder: FastDecoder) -> list[tuple[str, int, int]]:
        events.append("read")
        return read(decoder)

    monkeypatch.setattr(ModelRunner, "execute", noted_execute)
    monkeypatch.setattr(FastDecoder, "operation_times", noted_read)
    path = make_checkpoint(tmp_path / "small", *FAMILY["llama"])
    assert main(["--model", str(path), "--context", "40", "--batch", "1", "--prompt", "0", "--steps", "3"]) == 0
    assert events.count("read") == 3
    assert all(before == "end" for before, event in pairwise(events) if event == "read")
