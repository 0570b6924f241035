"""What the terminal shows while a server starts."""

from __future__ import annotations

import pytest

from ringserve.progress import StartDisplay, ready_line


def test_the_clock_runs_through_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with StartDisplay("tiny") as display:
        assert display._bar is not None
        (task,) = display._bar.tasks
        for stage, fraction in (("loading weights", 0.5), ("loading weights", 1.0), ("warming up", 0.0)):
            display.update(stage, fraction)
            assert (task.description, round(task.completed, 2), task.finished) == (stage, fraction, False)


def test_elsewhere_each_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with StartDisplay("tiny") as display:
        for stage, fraction in (("loading weights", 0.5), ("loading weights", 1.0), ("warming up", 0.0)):
            display.update(stage, fraction)
    display.update("too late", 0.0)
    assert capsys.readouterr().err == "ringserve: loading weights ...\nringserve: warming up ...\n"


def test_the_line_it_ends_with() -> None:
    summary: dict[str, str | int | float] = {
        "url": "http://h:1",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "device": "cpu",
        "threads": 2,
        "kv_tokens": 12345,
        "model_impl": "fast",
        "quantization": "none",
        "instructions": "avx512",
    }
    line = ready_line("tiny", summary)
    assert line.startswith(
        "ringserve: serving tiny at http://h:1 | bfloat16 on cpu, fast path (avx512), 2 thread(s) | "
        "KV cache 12,345 tokens | "
    )
    assert line.endswith(" s")
    assert "| KV cache 12,345 tokens in int8 | " in ready_line("tiny", {**summary, "kv_dtype": "int8"})
