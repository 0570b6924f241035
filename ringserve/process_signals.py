"""Which signals are the supervisor's business alone."""

from __future__ import annotations

import signal

HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They reach every process of a terminal's group or of a service. Children start with them blocked, and ignore them
from then on, but for SIGTERM at the edge (``actor_async``)."""
