"""SIGKILL in the middle of whatever a producer does. A thousand kills are a kept run of producer_kills.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "producer_kills.py"


@pytest.mark.parametrize(("transport", "kills"), [("ring", 100), ("socket", 30)])
def test_killed_producers_leave_whole_messages_and_nothing_else(transport: str, kills: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), "--kills", str(kills), "--transport", transport],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["kills"], result["bad"], result["left_behind"]) == (kills, 0, [])
    assert result["messages_checked"] > kills
