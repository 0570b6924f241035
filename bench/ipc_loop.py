"""Both ends on uvloop, as the frontend and the tokenizer process are: ring, fallback, zmq.asyncio, asyncio streams."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ringserve.bench.ipc_channel import ChannelSpec
from ringserve.bench.ipc_links import LINKS
from ringserve.bench.ipc_messages import Answerer, Pin, Probe, Stamp, Stop, decode, encode, payload, pin_all_threads
from ringserve.bench.ipc_pair import BURST
from ringserve.bench.ipc_unix import Unframer, UnixSpec, framed, unix_link
from ringserve.bench.ipc_zmq import ZmqSpec
from ringserve.process_signals import HELD_SIGNALS
from ringserve.shm import ChannelClosed, Consumer, Doorbell, Producer
from ringserve.spawn import ChildProcess

OnMessage = Callable[[bytes], "bytes | None"]
"""Handles a message; what it returns is sent back."""

TRANSPORTS = ("ring", "socket", "pyzmq", "unix")


class LoopEnd(Protocol):
    async def send(self, messages: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


class ChannelLoopEnd:
    """Delivers from the doorbell's reader: no task is woken for a message."""

    def __init__(self, spec: ChannelSpec, on_message: OnMessage) -> None:
        self._loop = asyncio.get_running_loop()
        self._bell = Doorbell.attach(spec.bell)
        self._consumer, self._producer = Consumer.attach(spec.incoming), Producer.attach(spec.outgoing)
        self._on_message = on_message
        self._space = asyncio.Event()
        self._loop.add_reader(self._bell.fileno(), self._rung)
        self._loop.call_soon(self._turn)

    def _rung(self) -> None:
        self._bell.clear()
        self._space.set()
        self._turn()

    def _turn(self) -> None:
        try:
            messages = self._consumer.drain()
        except ChannelClosed:  # the other end is done
            self._loop.remove_reader(self._bell.fileno())
            return
        for data in messages:
            reply = self._on_message(data)
            if reply is not None:
                self._producer.put_nowait(reply)
        self._producer.flush()
        if not self._bell.arm((self._consumer,), (self._producer,)):
            self._loop.call_soon(self._turn)
            self._space.set()

    async def send(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            while not self._producer.try_put(data):
                self._space.clear()
                self._turn()
                await self._space.wait()
        self._producer.flush()

    def close(self) -> None:
        self._loop.remove_reader(self._bell.fileno())
        for thing in (self._producer, self._consumer, self._bell):
            thing.close()


class ZmqLoopEnd:
    """A PAIR socket of zmq.asyncio, awaited."""

    def __init__(self, spec: ZmqSpec, on_message: OnMessage) -> None:
        import zmq.asyncio  # an extra

        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        if spec.binds:
            self._socket.bind(spec.address)
        else:
            self._socket.connect(spec.address)
        self._on_message = on_message
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            reply = self._on_message(await self._socket.recv())
            if reply is not None:
                await self._socket.send(reply)

    async def send(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            await self._socket.send(data)

    def close(self) -> None:
        self._reader.cancel()
        self._socket.close(linger=0)
        self._context.term()


class StreamLoopEnd:
    """asyncio's StreamReader and StreamWriter over a Unix socket."""

    def __init__(self, spec: UnixSpec, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._connected: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.ensure_future(self._read(spec))

    async def _read(self, spec: UnixSpec) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=spec.socket(), limit=1 << 20)
        self._connected.set_result(writer)
        unframer = Unframer()
        while data := await reader.read(1 << 18):
            for message in unframer.feed(data):
                reply = self._on_message(message)
                if reply is not None:
                    writer.write(framed((reply,)))

    async def send(self, messages: Sequence[bytes]) -> None:
        writer = await self._connected
        writer.write(framed(messages))
        await writer.drain()

    def close(self) -> None:
        self._reader.cancel()
        self._connected.result().close()


def open_end(spec: object, on_message: OnMessage) -> LoopEnd:
    """The end that belongs to the specification."""
    match spec:
        case ChannelSpec():
            return ChannelLoopEnd(spec, on_message)
        case ZmqSpec():
            return ZmqLoopEnd(spec, on_message)
        case UnixSpec():
            return StreamLoopEnd(spec, on_message)
    raise TypeError(spec)


def answer_on_loop(spec: object) -> None:
    """The child."""
    import uvloop

    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)

    async def live() -> None:
        answerer = Answerer(lambda: 0)
        stopped = asyncio.Event()

        def on_message(data: bytes) -> bytes | None:
            reply = answerer.answer(data)
            if answerer.stopped:
                stopped.set()
            return reply

        end = open_end(spec, on_message)
        await stopped.wait()
        end.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())


class LoopPair:
    """This process's loop and a child's. ``run`` measures once; everything lives for one call of ``asyncio.run``."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._link = unix_link() if transport == "unix" else LINKS[transport][1]()
        self._child = ChildProcess(f"bench-ipc-loop-{transport}", answer_on_loop, self._link.far)
        self._end: LoopEnd | None = None
        self._next: Callable[[Stamp], bytes | None] = lambda _stamp: None

    def start(self) -> None:
        """On the running loop."""
        self._end = open_end(self._link.near, self._on_message)

    def _on_message(self, data: bytes) -> bytes | None:
        stamp = decode(data)
        assert isinstance(stamp, Stamp)
        return self._next(stamp)

    async def place(self, near: Sequence[int], far: Sequence[int]) -> None:
        pin_all_threads(near)
        await self._ask(encode(Pin(list(far))))

    async def latency(self, size: int, count: int) -> list[float]:
        """One way, microseconds; ping-pong from handler to handler."""
        content, found = payload(size), []
        done = asyncio.get_running_loop().create_future()
        now = time.monotonic_ns
        sent = 0

        def following(stamp: Stamp) -> bytes | None:
            nonlocal sent
            found.append((stamp.received_ns - sent) * 1e-3)
            if len(found) == count:
                done.set_result(None)
                return None
            sent = now()
            return encode(Probe(sent, True, content))

        self._next = following
        assert self._end is not None
        sent = now()
        await self._end.send((encode(Probe(sent, True, content)),))
        await done
        return found

    async def throughput(self, size: int, count: int) -> float:
        """Messages per second."""
        content = payload(size)
        assert self._end is not None
        start = time.perf_counter()
        for first in range(0, count, BURST):
            await self._end.send([encode(Probe(0, False, content)) for _ in range(first, min(first + BURST, count))])
        await self._ask(encode(Probe(0, True)))
        return count / (time.perf_counter() - start)

    async def _ask(self, question: bytes) -> None:
        done = asyncio.get_running_loop().create_future()

        def answered(_stamp: Stamp) -> None:
            done.set_result(None)

        self._next = answered
        assert self._end is not None
        await self._end.send((question,))
        await done

    async def close(self) -> None:
        assert self._end is not None
        await self._end.send((encode(Stop()),))
        await asyncio.get_running_loop().run_in_executor(None, self._child.join, 5.0)
        if self._child.exitcode is None:
            self._child.kill()
            self._child.join()
        self._child.close()
        self._end.close()
        self._link.close()


def available() -> list[str]:
    """What can be measured here."""
    return [name for name in TRANSPORTS if name != "pyzmq" or importlib.util.find_spec("zmq")]
