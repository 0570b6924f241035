"""What a run costs: the server's processes, this client, and whatever else computed meanwhile."""

from __future__ import annotations

import time

import msgspec

from ringserve.bench.processes import ProcessTree, machine_cpu_seconds

NOTEWORTHY_CORES = 0.1
"""Others' use beyond which a result is marked."""


class SystemUse(msgspec.Struct, kw_only=True, frozen=True):
    """Over one run. None: not known, because the server is not a visible process of this machine."""

    client_cores: float
    """Of this process: load generator, progress bar."""
    server_cpu_seconds: float | None
    server_cores: float | None
    server_peak_resident_bytes: int | None
    """Largest sum of the processes' resident sets, looked at every second; shared memory counts for each process."""
    server_processes: int | None
    other_cores: float | None
    """Of all other processes of this machine."""


class SystemWatch:
    """From construction to ``finish()``; ``sample()`` in between, about once a second."""

    def __init__(self, server: ProcessTree | None) -> None:
        self._server = server
        self._peak = server.resident_bytes() if server else 0
        self._processes = len(server.pids()) if server else 0
        self._started = self._read()

    def sample(self) -> None:
        """Look at the server's memory."""
        if self._server:
            self._peak = max(self._peak, self._server.resident_bytes())

    def finish(self) -> SystemUse:
        """The use since construction."""
        self.sample()
        wall, own, server, machine = (now - then for now, then in zip(self._read(), self._started, strict=True))
        wall = max(wall, 1e-9)
        if self._server is None:
            return SystemUse(
                client_cores=own / wall,
                server_cpu_seconds=None,
                server_cores=None,
                server_peak_resident_bytes=None,
                server_processes=None,
                other_cores=None,
            )
        return SystemUse(
            client_cores=own / wall,
            server_cpu_seconds=server,
            server_cores=server / wall,
            server_peak_resident_bytes=self._peak,
            server_processes=self._processes,
            other_cores=max(0.0, machine - own - server) / wall,
        )

    def _read(self) -> tuple[float, float, float, float]:
        server = self._server.cpu_seconds() if self._server else 0.0
        return time.perf_counter(), time.process_time(), server, machine_cpu_seconds()
