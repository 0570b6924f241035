"""The skeleton with real processes and rings: order, idleness, goodbyes, deaths, faults."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import msgspec
import pytest

from ringserve.child import ActorSpec, run_actor
from ringserve.messages.rings import ExecutorMessage
from ringserve.messages.startup import LoadProgress, Started, SupervisorInbound
from ringserve.messages.steps import SchedulerOutput
from ringserve.shm import (
    ChannelClosed,
    Consumer,
    Doorbell,
    Producer,
    Receiver,
    Sender,
    Transport,
    create_channel,
    create_doorbell,
)

FAULTY_STEP = 10**9
STEPS = 5000


class Neighbour:
    """The scheduler's end, in the test's process, and the actor under test in a child."""

    def __init__(self, on_loop: bool, transport: Transport, at_the_edge: bool = False) -> None:
        bells = {name: create_doorbell(name, transport=transport) for name in ("scheduler", "executor")}
        down = create_channel("down", producer=bells["scheduler"], consumer=bells["executor"], transport=transport)
        up = create_channel("up", producer=bells["executor"], consumer=bells["scheduler"], transport=transport)
        self.doorbell = Doorbell.attach(bells["scheduler"])
        self.sender: Sender[SchedulerOutput] = Sender(Producer.attach(down.producer_end))
        self.receiver: Receiver[LoadProgress] = Receiver(Consumer.attach(up.consumer_end), ExecutorMessage)
        context = multiprocessing.get_context("spawn")
        self.reports: Connection
        self.reports, reports = context.Pipe(duplex=False)
        spec = ActorSpec(
            role="executor",
            module="echo_actors",
            on_loop=on_loop,
            at_the_edge=at_the_edge,
            settings=on_loop,
            doorbell=bells["executor"],
            inbox=(("scheduler", down.consumer_end),),
            outbox=(("scheduler", up.producer_end),),
            peers=(("scheduler", bells["scheduler"]),),
            reports=reports,
            supervisor_pid=os.getpid(),
            log_level="info",
        )
        self.process: SpawnProcess = context.Process(target=run_actor, args=(spec,))
        self.process.start()
        reports.close()
        down.close()
        up.close()
        self._bells = bells

    def send(self, *steps: int) -> None:
        for step in steps:
            self.sender.send(SchedulerOutput(step, (), b"", b"", b"", b"", b""))
        self.sender.flush()

    def receive(self, count: int) -> list[str]:
        """Stages of the next ``count`` answers."""
        got: list[str] = []
        while len(got) < count:
            batch = self.receiver.receive()
            got += [message.stage for message in batch]
            self.sender.flush()
            if batch or not self.doorbell.arm([self.receiver.consumer], [self.sender.producer]):
                continue
            if self.doorbell.wait(60, [self.process.sentinel]):  # it has ended; what it had sent comes first
                got += [message.stage for message in self.receiver.receive()]
                assert len(got) >= count, "the actor died"
        return got

    def close(self) -> None:
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self.process.close()
        self.reports.close()
        self.receiver.consumer.close()
        self.sender.producer.close()
        self.doorbell.close()
        for bell in self._bells.values():
            bell.close()


@contextmanager
def neighbour(on_loop: bool, transport: Transport = "auto", at_the_edge: bool = False) -> Iterator[Neighbour]:
    running = Neighbour(on_loop, transport, at_the_edge)
    try:
        yield running
    finally:
        running.close()


both = pytest.mark.parametrize("on_loop", [False, True], ids=["blocking", "async"])


@both
@pytest.mark.parametrize("transport", ["ring", "socket"])
def test_messages_are_answered_in_order(on_loop: bool, transport: Transport) -> None:
    with neighbour(on_loop, transport) as actor:
        report = msgspec.msgpack.Decoder(SupervisorInbound).decode(actor.reports.recv_bytes())
        assert report == Started({"echo": 2 if on_loop else 1})
        actor.send(1)
        assert actor.receive(1) == ["1"]
        actor.send(*range(STEPS))
        assert actor.receive(STEPS) == [str(step) for step in range(STEPS)]


def test_sigterm_asks_the_edge_to_finish() -> None:
    with neighbour(on_loop=True, at_the_edge=True) as actor:
        actor.send(1)
        assert actor.receive(1) == ["1"]
        actor.process.terminate()
        assert actor.receive(1) == ["goodbye"]
        actor.process.join(30)
        assert actor.process.exitcode == 0
        with pytest.raises(ChannelClosed):
            actor.receiver.receive()


@both
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_others_are_the_supervisors_business(on_loop: bool, signum: signal.Signals) -> None:
    with neighbour(on_loop) as actor:
        actor.send(1)
        assert actor.receive(1) == ["1"]
        assert actor.process.pid is not None
        os.kill(actor.process.pid, signum)
        actor.send(2)
        assert actor.receive(1) == ["2"]


@both
@pytest.mark.parametrize("transport", ["ring", "socket"])
def test_a_closed_channel_is_a_goodbye(on_loop: bool, transport: Transport) -> None:
    with neighbour(on_loop, transport) as actor:
        actor.send(1)
        assert actor.receive(1) == ["1"]
        actor.sender.producer.close()
        actor.process.join(30)
        assert actor.process.exitcode == 0


@both
@pytest.mark.parametrize("transport", ["ring", "socket"])
def test_a_fault_ends_the_process_and_is_logged(
    on_loop: bool, transport: Transport, capfd: pytest.CaptureFixture[str]
) -> None:
    with neighbour(on_loop, transport) as actor:
        actor.send(FAULTY_STEP)
        actor.process.join(30)
        assert actor.process.exitcode == 1
    assert "a planted fault" in capfd.readouterr().err


@both
def test_it_does_not_outlive_its_supervisor(on_loop: bool) -> None:
    """The whole arrangement in a process of its own, which is killed: it is the actor's peer and its supervisor."""
    code = (
        "import sys, time; sys.path[:0] = sys.argv[2:]\n"
        "import test_actor\n"
        "if __name__ == '__main__':\n"
        "    actor = test_actor.Neighbour(sys.argv[1] == 'True', 'auto')\n"
        "    actor.send(1); actor.receive(1)\n"
        "    print(actor.process.pid, flush=True); time.sleep(600)\n"
    )
    here = os.path.dirname(__file__)
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(on_loop), here, os.path.join(here, "..", "support")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    try:
        assert select.select([pidfd], [], [], 30)[0] == [pidfd]
    finally:
        os.close(pidfd)
