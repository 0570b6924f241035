"""Two processes and the link between them: one-way latency, throughput, CPU per message, the cost of being idle."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ringserve.bench.ipc_ends import EndSpec
from ringserve.bench.ipc_links import LINKS
from ringserve.bench.ipc_messages import (
    Answerer,
    Pin,
    Probe,
    Report,
    Stamp,
    Stop,
    decode,
    encode,
    payload,
    pin_all_threads,
)
from ringserve.process_signals import HELD_SIGNALS
from ringserve.spawn import ChildProcess

BURST = 32
"""Messages sent in one go when throughput is measured, as an actor sends a turn's: one flush, where there is one."""


def answer_forever(spec: EndSpec) -> None:
    """The child: receive, decode, answer."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    end = spec.open()
    answerer = Answerer(end.doorbells)
    while not answerer.stopped:
        for data in end.receive():
            reply = answerer.answer(data)
            if reply is not None:
                end.send((reply,))
    end.close()


class Throughput(msgspec.Struct, frozen=True):
    """Of one burst-wise transfer."""

    messages_per_s: float
    cpu_us: float
    """Of both processes, all threads, per message."""
    doorbells: float
    """Per message; 0 where unknown."""


class Use(msgspec.Struct, frozen=True):
    """Of a process over a while."""

    cpu_ms: float
    context_switches: int


class Pair:
    """This process and one child at the far end."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._link = LINKS[transport][1]()
        self._child = ChildProcess(f"bench-ipc-{transport}", answer_forever, self._link.far)
        self._end = self._link.near.open()
        self._received: list[bytes] = []

    def place(self, near: Sequence[int], far: Sequence[int]) -> None:
        """Pin both processes."""
        pin_all_threads(near)
        self._ask(Pin(list(far)))

    def latency(self, size: int, count: int, gap_s: float) -> list[float]:
        """One way, in microseconds, from before encoding to after decoding, ``count`` times; a message goes out when
        the answer to the last is back, after a pause of ``gap_s``."""
        content, found = payload(size), []
        now = time.monotonic_ns
        for _ in range(count):
            if gap_s:
                time.sleep(gap_s)
            sent = now()
            self._end.send((encode(Probe(sent, True, content)),))
            stamp = self._receive_one()
            assert isinstance(stamp, Stamp)
            found.append((stamp.received_ns - sent) * 1e-3)
        return found

    def throughput(self, size: int, count: int) -> Throughput:
        """Send ``count`` messages in bursts; over when the last is answered."""
        content = payload(size)
        before = self._report()
        rung, cpu, start = self._end.doorbells(), time.process_time_ns(), time.perf_counter()
        for first in range(0, count, BURST):
            burst = [encode(Probe(0, False, content)) for _ in range(first, min(first + BURST, count))]
            self._end.send(burst)
        self._ask(Probe(0, True))
        seconds = time.perf_counter() - start
        own = time.process_time_ns() - cpu
        after = self._report()
        total = own + after.cpu_ns - before.cpu_ns
        return Throughput(count / seconds, total * 1e-3 / count, (self._end.doorbells() - rung) / count)

    def use(self) -> Use:
        """Of the child so far, all threads; read from /proc, so that it is not woken."""
        cpu_ns = switches = 0
        for task in Path(f"/proc/{self._child.pid}/task").iterdir():
            cpu_ns += int((task / "schedstat").read_text().split()[0])
            for line in (task / "status").read_text().splitlines():
                if "ctxt_switches" in line:
                    switches += int(line.split()[1])
        return Use(cpu_ns * 1e-6, switches)

    def close(self) -> None:
        self._end.send((encode(Stop()),))
        self._child.join(5.0)
        if self._child.exitcode is None:
            self._child.kill()
            self._child.join()
        self._child.close()
        self._end.close()
        self._link.close()

    def _ask(self, question: Probe | Pin | Report) -> Stamp | Report:
        self._end.send((encode(question),))
        answer = self._receive_one()
        assert isinstance(answer, Stamp | Report)
        return answer

    def _report(self) -> Report:
        report = self._ask(Report())
        assert isinstance(report, Report)
        return report

    def _receive_one(self) -> object:
        (data,) = self._end.receive()
        return decode(data)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values; the nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
