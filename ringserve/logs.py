"""Log lines a person can read: time, process, message; on stderr."""

from __future__ import annotations

import logging
import sys


def set_up_logging(role: str, level: str) -> None:
    """Send this process's log lines to stderr, marked with its role."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role:<11} %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("ringserve")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
