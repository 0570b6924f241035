"""The doorbell of a process whose channels are sockets: their own readiness wakes it.

An epoll holds the eventfd (rings of neighbours, other threads and signal handlers), the sockets of the consumers that
were given to the last ``arm``, and those of its producers that wait for space. All of them are level-triggered: what is
there when the process falls asleep, or comes a moment later, wakes it, so neither end needs the ring's handshake, and
an event loop can watch the epoll as one descriptor.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringserve.shm.bell_page import COUNTERS, HEARTBEAT_NS, PHASE, PID, BellPage
from ringserve.shm.errors import AttachError, ShmError
from ringserve.shm.forks import FORKS

if TYPE_CHECKING:
    from ringserve.shm.socket_consumer import SocketConsumer
    from ringserve.shm.socket_end import SocketEnd
    from ringserve.shm.socket_producer import SocketProducer

_ARMS, _REFUSED_ARMS, _WAITS, _WAKES, _SPURIOUS_WAKES = range(COUNTERS // 8, COUNTERS // 8 + 5)
_MAX_EVENTS = 16
"""Of one look; what does not fit is still there at the next."""
_MAX_TIMEOUT = 1e6
"""Seconds; longer ones do not fit the kernel's milliseconds."""


class SocketBell(BellPage):
    """The interface of ``_ring.Bell``; its ends are those of sockets."""

    def __init__(self, page_fd: int, event_fd: int) -> None:
        super().__init__(page_fd, event_fd)
        self._epoll = select.epoll()
        self._epoll.register(self._event_fd, select.EPOLLIN)
        self._look = self._epoll.poll
        self._consumers: tuple[SocketConsumer, ...] = ()
        self._producers: tuple[SocketProducer, ...] = ()
        self._watch: tuple[int, ...] = ()
        self._watching = select.poll()
        self._waiting = 0  # threads inside wait()
        self._arms = self._refused_arms = self._waits = self._wakes = self._rings = self._spurious_wakes = 0
        self._progress = 0
        self._woken = False

    def claim(self, pid: int) -> None:
        self._check()
        owner = self._words32[PID // 4]
        if owner:
            raise AttachError(f"the doorbell belongs to process {owner}")
        self._words32[PID // 4] = pid

    def fileno(self) -> int:
        """The epoll: readable when there is something to do."""
        self._check()
        return self._epoll.fileno()

    def ring(self) -> None:
        super().ring()
        self._rings += 1

    def clear(self) -> None:
        """For event loops: takes a ring off the eventfd, and counts what woke us."""
        self._check()
        if events := self._look(0, _MAX_EVENTS):
            self._wake(events)

    def _wake(self, events: Sequence[tuple[int, int]]) -> None:
        for fd, _ in events:
            if fd == self._event_fd:
                os.eventfd_read(fd)
        self._woken = True
        self._wakes += 1
        for end in self._consumers:
            end.unread = True  # one of them; finding out which is cheapest where it is read

    def arm(self, consumers: Sequence[Any], producers: Sequence[Any]) -> bool:
        """Of SocketConsumers and SocketProducers. False if an end is known to have something. True: what came since it
        was last looked at will wake us too."""
        if self._event_fd < 0 or self._generation != FORKS.generation:
            self._check()
        if consumers is not self._consumers or producers is not self._producers:  # tuples do not change
            consumers, producers = tuple(consumers), tuple(producers)
            if consumers != self._consumers or producers != self._producers:
                self._leave_out(consumers, producers)
        epoll = self._epoll
        self._arms += 1
        progress = 0
        ready = False
        for consumer in self._consumers:
            if consumer.watched_by is not epoll:
                consumer.watch(epoll)
            progress += consumer.progress
            if consumer.unread and consumer.ready():
                ready = True
        for producer in self._producers:
            progress += producer.progress
            if producer.waiting:
                if producer.watched_by is not epoll:
                    producer.watch(epoll)
                if producer.ready():
                    ready = True
        words = self._words64
        words[_ARMS] = self._arms
        if ready:
            self._refused_arms = words[_REFUSED_ARMS] = self._refused_arms + 1
            return False
        if self._woken:
            if progress == self._progress:
                self._spurious_wakes = words[_SPURIOUS_WAKES] = self._spurious_wakes + 1
            self._woken = False
            words[_WAKES] = self._wakes
        self._progress = progress
        words[_WAITS] = self._waits
        return True

    def _leave_out(self, consumers: tuple[SocketConsumer, ...], producers: tuple[SocketProducer, ...]) -> None:
        """Only the ends of the new sets may wake us: a consumer that is not drained would do so for ever."""
        before: tuple[SocketEnd, ...] = (*self._consumers, *self._producers)
        self._consumers, self._producers = consumers, producers
        for end in before:
            if end.watched_by is self._epoll and end not in self._consumers and end not in self._producers:
                end.unwatch()

    def set_spin(self, nanoseconds: int) -> None:
        """A socket cannot be looked at without a system call: this one never spins."""
        self._check()

    def disarm(self) -> None:
        self._check()

    def wait(self, timeout: float | None, watch: Sequence[int]) -> tuple[int, ...]:
        if self._event_fd < 0 or self._generation != FORKS.generation:
            self._check()
        self._waits += 1
        if timeout is not None:  # a NaN is "do not wait" too
            timeout = min(timeout, _MAX_TIMEOUT) if timeout > 0 else 0.0
        if watch:
            return self._wait_watching(timeout, tuple(watch))
        self._waiting += 1
        try:
            events = self._look(timeout, _MAX_EVENTS)
        finally:
            self._waiting -= 1
        if events:
            self._wake(events)
        return ()

    def _wait_watching(self, timeout: float | None, watch: tuple[int, ...]) -> tuple[int, ...]:
        """The descriptors of ``watch`` are the caller's, who may close them, and the kernel may give their numbers to
        others: so they are not registered in the epoll but looked up at each wait, beside it."""
        if watch != self._watch:
            watching = select.poll()
            for fd in (self._event_fd, self._epoll.fileno(), *watch):
                watching.register(fd, select.POLLIN)
            self._watch, self._watching = watch, watching
        self._waiting += 1
        try:
            events = self._watching.poll(None if timeout is None else math.ceil(timeout * 1e3))
        finally:
            self._waiting -= 1
        found = dict(events)
        if any(event & select.POLLNVAL for event in found.values()):
            raise OSError("a watched file descriptor is closed")
        if self._epoll.fileno() in found:
            self._wake(events)
        return tuple([fd for fd in watch if fd in found])

    def beat(self, now_ns: int) -> None:
        self._check()
        self._words64[HEARTBEAT_NS // 8] = now_ns

    def set_phase(self, phase: int) -> None:
        self._check()
        self._words32[PHASE // 4] = phase

    def counters(self) -> tuple[int, int, int, int, int, int, int]:
        """arms, refused_arms, waits, wakes, rings, spurious_wakes, spins."""
        return self._arms, self._refused_arms, self._waits, self._wakes, self._rings, self._spurious_wakes, 0

    def close(self) -> None:
        if self._event_fd < 0:
            return
        if self._waiting:
            raise ShmError("a thread is waiting on the doorbell")
        self._epoll.close()  # the registrations go with it; in a child of fork they are the parent's and stay
        self._consumers, self._producers = (), ()
        super().close()
