"""Which processes there are, and which rings run between them.

    frontend-0 <--> tokenizer-0 <--> scheduler <--> executor

Each arrow is two rings, one for each direction; each process has one doorbell for all its incoming rings. More
frontends or tokenizer processes are more rings, never a shared writer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ringserve import __version__
from ringserve.actor import Mailbox
from ringserve.child import ActorSpec, open_mailbox
from ringserve.config import (
    ExecutorSettings,
    FrontendSettings,
    ModelSource,
    SchedulerSettings,
    ServeConfig,
    TokenizerSettings,
)
from ringserve.shm import (
    ChannelHandle,
    DoorbellHandle,
    DoorbellObserverEnd,
    RingObserverEnd,
    create_channel,
    create_doorbell,
)

FRONTEND = "frontend-0"
TOKENIZER = "tokenizer-0"
SCHEDULER = "scheduler"
EXECUTOR = "executor"

EDGES = ((FRONTEND, TOKENIZER), (TOKENIZER, SCHEDULER), (SCHEDULER, EXECUTOR))
"""Neighbours; messages flow both ways."""


@dataclass(frozen=True)
class Role:
    """How a process is started."""

    name: str
    module: str
    on_loop: bool
    settings: Any


def roles(config: ServeConfig, source: ModelSource) -> tuple[Role, ...]:
    """The processes in the order in which they are started: what takes longest to load first, but the frontend,
    which answers while the others load."""
    level = config.logging.log_level
    return (
        Role(
            FRONTEND,
            "ringserve.frontend.server",
            True,
            FrontendSettings(
                index=0,
                model_name=source.name,
                max_num_seqs=config.scheduler.max_num_seqs,
                version=__version__,
                config=config.frontend,
                overload_status=config.scheduler.overload_status,
                log_level=level,
            ),
        ),
        Role(
            EXECUTOR,
            "ringserve.engine.executor",
            False,
            ExecutorSettings(
                source=source,
                dtype=config.model.dtype,
                max_model_len=config.model.max_model_len,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                config=config.executor,
                log_level=level,
            ),
        ),
        Role(
            TOKENIZER,
            "ringserve.engine.tokenizer",
            True,
            TokenizerSettings(
                source=source,
                tokenizer=config.model.tokenizer,
                chat_template=config.model.chat_template,
                log_level=level,
            ),
        ),
        Role(
            SCHEDULER,
            "ringserve.engine.scheduler_loop",
            False,
            SchedulerSettings(config=config.scheduler, log_level=level),
        ),
    )


class Wiring:
    """All doorbells and rings of one server, as the supervisor holds them until the children have them."""

    def __init__(self, config: ServeConfig) -> None:
        names = sorted({name for edge in EDGES for name in edge})
        self.doorbells: dict[str, DoorbellHandle] = {
            name: create_doorbell(name, transport=config.transport.transport) for name in names
        }
        self._channels: dict[tuple[str, str], ChannelHandle] = {}
        self._spin_us = worthwhile_spin(config.transport.ring_spin_us, len(names))
        for left, right in EDGES:
            for producer, consumer in ((left, right), (right, left)):
                self._channels[producer, consumer] = create_channel(
                    f"{producer}>{consumer}",
                    producer=self.doorbells[producer],
                    consumer=self.doorbells[consumer],
                    capacity=config.transport.ring_capacity,
                    transport=config.transport.transport,
                )

    @property
    def transport(self) -> str:
        """ "ring" or "socket"."""
        return next(iter(self._channels.values())).transport

    def spec(self, role: Role, reports: Connection, log_level: str) -> ActorSpec:
        """What the child ``role`` is born with."""
        neighbours = _neighbours(role.name)
        return ActorSpec(
            role=role.name,
            module=role.module,
            on_loop=role.on_loop,
            at_the_edge=role.name == FRONTEND,
            settings=role.settings,
            doorbell=self.doorbells[role.name],
            inbox=tuple((other, self._channels[other, role.name].consumer_end) for other in neighbours),
            outbox=tuple((other, self._channels[role.name, other].producer_end) for other in neighbours),
            peers=tuple((other, self.doorbells[other]) for other in neighbours),
            reports=reports,
            supervisor_pid=os.getpid(),
            log_level=log_level,
            observers=self._observers() if role.name == FRONTEND else (),
            spin_us=self._spin_us,
        )

    def _observers(self) -> tuple[RingObserverEnd | DoorbellObserverEnd, ...]:
        rings = [channel.observer() for channel in self._channels.values()]
        return (*(end for end in rings if end), *(doorbell.observer() for doorbell in self.doorbells.values()))

    def open_mailbox(self, name: str) -> Mailbox:
        """The place of ``name`` is taken by this very process."""
        neighbours = _neighbours(name)
        return open_mailbox(
            name,
            self.doorbells[name],
            [(other, self._channels[other, name].consumer_end) for other in neighbours],
            [(other, self._channels[name, other].producer_end) for other in neighbours],
            [(other, self.doorbells[other]) for other in neighbours],
        )

    def close_channels(self) -> None:
        """The children have them; a dead producer's socket must read as closed."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def close(self) -> None:
        self.close_channels()
        for doorbell in self.doorbells.values():
            doorbell.close()


def worthwhile_spin(wanted_us: int, processes: int) -> int:
    """Spinning pays only where it keeps nobody from computing: 0 with fewer processors than processes."""
    return wanted_us if len(os.sched_getaffinity(0)) >= processes else 0


def _neighbours(name: str) -> list[str]:
    return [right if left == name else left for left, right in EDGES if name in (left, right)]
