"""The transports that ``ringserve bench ipc`` compares, by name.

Every transport is used the way its documentation says a program should; what can send several messages in one go does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from ringserve.bench import ipc_iceoryx
from ringserve.bench.ipc_channel import channel_link
from ringserve.bench.ipc_ends import Link
from ringserve.bench.ipc_faster_fifo import faster_fifo_link
from ringserve.bench.ipc_multiprocessing import pipe_link, queue_link
from ringserve.bench.ipc_unix import unix_link
from ringserve.bench.ipc_zmq import zmq_link
from ringserve.shm import MAX_SPIN_US


def _iceoryx_link() -> Link:
    near, far = ipc_iceoryx.specs()
    return Link(near, far, lambda: None)


BASELINE = "pyzmq"

LINKS: dict[str, tuple[str | None, Callable[[], Link]]] = {
    "ring": (None, lambda: channel_link("ring")),
    "ring-spin": (None, lambda: channel_link("ring", MAX_SPIN_US)),
    "socket": (None, lambda: channel_link("socket")),
    BASELINE: ("zmq", zmq_link),
    "mp.Queue": (None, queue_link),
    "mp.Pipe": (None, pipe_link),
    "unix": (None, unix_link),
    "iceoryx2": ("iceoryx2", _iceoryx_link),
    "faster-fifo": ("faster_fifo", faster_fifo_link),
}
"""(module that must be importable, constructor); "ring-spin" may spin 20 us before it sleeps, "socket" is our
fallback, "unix" a raw stream socket pair."""


def available() -> list[str]:
    """Transports that can be measured here."""
    return [name for name, (module, _) in LINKS.items() if module is None or importlib.util.find_spec(module)]
