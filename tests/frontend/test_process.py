"""The frontend as a process: what it may import, and that it sleeps when idle."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
from frontend_harness import RunningFrontend, chat_body

FORBIDDEN = ("torch", "transformers", "triton", "cupy", "tokenizers", "numpy", "ringserve.engine", "ringserve.kernels")


def test_imports() -> None:
    code = "import sys, ringserve.frontend.server; print('\\n'.join(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "ringserve.frontend.server" in modules
    assert [name for name in FORBIDDEN if name in modules] == []


def test_an_idle_frontend_makes_no_wake_ups() -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        assert http.post("/v1/chat/completions", json=chat_body()).status_code == 200
        assert http.post("/v1/chat/completions", json=chat_body(stream=True)).status_code == 200
        frontend.wait_until(lambda: frontend.actor._app.active == 0)
        status = Path(f"/proc/self/task/{frontend._thread.native_id}/status")
        frontend.statistics()  # its own wake-up is over when the counter is read below
        time.sleep(0.05)
        before = _switches(status)
        time.sleep(0.5)
        assert _switches(status) == before


def _switches(status: Path) -> int:
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])
