"""A server that the commands start themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from script_servers import ANSWERS


@pytest.fixture
def command(tmp_path: Path) -> str:
    """Starts a server that answers; to be given as ``--command``."""
    script = tmp_path / "server.py"
    script.write_text(ANSWERS)
    return f"{sys.executable} {script} {{port}}"
