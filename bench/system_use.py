"""What a run costs: the server's processes, this client, and whatever else computed meanwhile."""

from __future__ import annotations

import time

import msgspec

from ringserve.bench.processes import ProcessTree, machine_cpu_seconds

NOTEWORTHY_CORES = 0.1
"""Others' use beyond which a result is marked."""


class SystemUse(msgspec.Struct, kw_only=True, frozen=True):
    """Over one run. None: not known, because the server is not a visible process of this machine."""

    server_ended: bool = False
    """During the run; its use is what was seen last."""

    client_cores: float
    """Of this process: load generator, progress bar."""
    server_cpu_seconds: float | None
    server_cores: float | None
    server_peak_resident_bytes: int | None
    """Largest sum of the processes' resident sets, looked at every second; shared memory counts for each process."""
    server_processes: int | None
    other_cores: float | None
    """Of all other processes of this machine. Known, too, where the server is on another one."""


class SystemWatch:
    """From construction to ``finish()``; ``sample()`` in between, about once a second.

    Args:
        elsewhere: a server that is not visible here is on another machine.
    """

    def __init__(self, server: ProcessTree | None, *, elsewhere: bool = False) -> None:
        self._server = server
        self._elsewhere = elsewhere
        self._server_seconds = 0.0
        self._peak = server.resident_bytes() if server else 0
        self._processes = len(server.pids()) if server else 0
        self._started = self._read()

    def sample(self) -> None:
        """Look at the server's use: it may be gone at the next look."""
        if self._server:
            self._server_seconds = max(self._server_seconds, self._server.cpu_seconds())
            self._peak = max(self._peak, self._server.resident_bytes())

    def finish(self) -> SystemUse:
        """The use since construction."""
        wall, own, server, machine = (now - then for now, then in zip(self._read(), self._started, strict=True))
        wall = max(wall, 1e-9)
        if self._server is None:
            return SystemUse(
                client_cores=own / wall,
                server_cpu_seconds=None,
                server_cores=None,
                server_peak_resident_bytes=None,
                server_processes=None,
                other_cores=max(0.0, machine - own) / wall if self._elsewhere else None,
            )
        return SystemUse(
            server_ended=not self._server.alive(),
            client_cores=own / wall,
            server_cpu_seconds=server,
            server_cores=server / wall,
            server_peak_resident_bytes=self._peak,
            server_processes=self._processes,
            other_cores=max(0.0, machine - own - server) / wall,
        )

    def _read(self) -> tuple[float, float, float, float]:
        self.sample()
        return time.perf_counter(), time.process_time(), self._server_seconds, machine_cpu_seconds()
