"""`ringserve.bench.cpu_step`: its parts add up, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from fast_models import FAMILY

from ringserve.bench.cpu_step import main


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
