"""``ringserve bench`` in this process: a small load, a call, its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringserve.cli import main

SMALL = ("--num-requests", "4", "--prompt-tokens", "5", "--output-tokens", "3", "--concurrency", "2")


def serve(url: str, *arguments: str) -> int:
    """Its exit status."""
    return main(["bench", "serve", "--url", url, *arguments])


def read(path: Path) -> Any:
    """A file of ``--json``."""
    return json.loads(path.read_text())
