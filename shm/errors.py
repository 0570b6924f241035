"""What can go wrong on a channel.

    ShmError
    ├── WouldBlock            no room now; the doorbell is rung when there is
    ├── ChannelOverflow       a Sender's local queue is full
    ├── MessageTooLarge       longer than a frame (put_nowait) or than MAX_MESSAGE (send)
    ├── ChannelClosed         the other end closed, and everything it sent has been drained
    ├── PeerDied              the other end's process is gone, and everything it sent has been drained
    ├── CorruptFrame          the bytes in the ring are not frames of this channel, or not messages of its type
    ├── AttachError           not the segment this end was made for, or already taken
    ├── ForkedUse             used under another process id than it was attached by
    └── TransportUnavailable  rings were asked for and cannot be had here

This module imports nothing: the C extension takes its exceptions from here.
"""


class ShmError(Exception):
    """Any failure of rings, doorbells and channels."""


class WouldBlock(ShmError):
    """No room now. The owner's doorbell will be rung when there is."""


class ChannelOverflow(ShmError):
    """More is pending in a Sender than its bound allows; the message was not taken."""


class MessageTooLarge(ShmError):
    """The message can never be put this way."""


class ChannelClosed(ShmError):
    """The other end closed the channel in order."""


class PeerDied(ShmError):
    """The process at the other end is gone without closing."""

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(f"channel {name}: the process at the other end (pid {pid}) died")
        self.name = name
        self.pid = pid

    def __reduce__(self) -> "tuple[type[PeerDied], tuple[str, int]]":
        return type(self), (self.name, self.pid)


class CorruptFrame(ShmError):
    """The channel's contents are not what its producer may write. The channel is lost."""


class AttachError(ShmError):
    """The descriptor is not what this end was made for, or it was attached before."""


class ForkedUse(ShmError):
    """An object was inherited by fork; rings have one process at each end."""


class TransportUnavailable(ShmError):
    """The ring transport cannot be used on this machine."""
