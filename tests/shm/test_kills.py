"""SIGKILL in the middle of whatever a producer does. A thousand kills are a kept run of producer_kills.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "support" / "producer_kills.py"


def test_killed_producers_leave_whole_messages_and_nothing_else() -> None:
    kills = 100
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), "--kills", str(kills)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["kills"], result["bad"], result["left_behind"]) == (kills, 0, [])
    assert result["messages_checked"] > kills
