"""Shared-memory rings, doorbells and channels between processes.

    supervisor                             process A                        process B
    create_doorbell, create_channel  --->  Doorbell.attach(handle)          Doorbell.attach(handle)
                                           Producer.attach(end)  ==ring==>  Consumer.attach(end)
                                           Sender[T]                        Receiver[T]

A channel has one producer and one consumer; a process has one doorbell for all channels that come into it. Where the
C extension cannot be built, socket pairs carry the channels behind the same types.
"""

from ringserve.shm.channel import ChannelHandle, ConsumerEnd, ProducerEnd, create_channel
from ringserve.shm.descriptors import open_pidfd
from ringserve.shm.doorbell import MAX_SPIN_US, Doorbell, DoorbellHandle, DoorbellStatistics, Phase, create_doorbell
from ringserve.shm.errors import (
    AttachError,
    ChannelClosed,
    ChannelOverflow,
    CorruptFrame,
    ForkedUse,
    MessageTooLarge,
    PeerDied,
    ShmError,
    TransportUnavailable,
    WouldBlock,
)
from ringserve.shm.observer import (
    DoorbellObserver,
    DoorbellObserverEnd,
    DoorbellReading,
    RingObserver,
    RingObserverEnd,
    RingReading,
)
from ringserve.shm.roles import MAX_MESSAGE, Consumer, ConsumerStatistics, Producer, ProducerStatistics
from ringserve.shm.support import Transport, extension_available, ring_unavailable_reason
from ringserve.shm.typed import Receiver, Sender

__all__ = [
    "MAX_MESSAGE",
    "MAX_SPIN_US",
    "AttachError",
    "ChannelClosed",
    "ChannelHandle",
    "ChannelOverflow",
    "Consumer",
    "ConsumerEnd",
    "ConsumerStatistics",
    "CorruptFrame",
    "Doorbell",
    "DoorbellHandle",
    "DoorbellObserver",
    "DoorbellObserverEnd",
    "DoorbellReading",
    "DoorbellStatistics",
    "ForkedUse",
    "MessageTooLarge",
    "PeerDied",
    "Phase",
    "Producer",
    "ProducerEnd",
    "ProducerStatistics",
    "Receiver",
    "RingObserver",
    "RingObserverEnd",
    "RingReading",
    "Sender",
    "ShmError",
    "Transport",
    "TransportUnavailable",
    "WouldBlock",
    "create_channel",
    "create_doorbell",
    "extension_available",
    "open_pidfd",
    "ring_unavailable_reason",
]
