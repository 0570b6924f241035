"""The extension must have been built here; where it was not, sockets take over by themselves."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ringserve import shm
from ringserve.shm import TransportUnavailable, create_channel, create_doorbell, extension_available


def test_the_extension_was_built() -> None:
    assert extension_available()
    assert shm.ring_unavailable_reason() is None


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ringserve.shm._ring", None)


@pytest.mark.usefixtures("no_extension")
def test_without_it_channels_go_over_sockets() -> None:
    assert not extension_available()
    assert "extension" in (shm.ring_unavailable_reason() or "")
    a, b = create_doorbell("a"), create_doorbell("b")
    with pytest.raises(TransportUnavailable):
        create_channel("ab", producer=a, consumer=b, transport="ring")
    channel = create_channel("ab", producer=a, consumer=b)
    assert channel.transport == "socket"
    bell = shm.Doorbell.attach(b)
    producer, consumer = shm.Producer.attach(channel.producer_end), shm.Consumer.attach(channel.consumer_end)
    assert bell.arm([consumer], [producer])
    producer.put_nowait(b"over a socket")
    producer.flush()
    bell.wait(30)
    assert bell.statistics().wakes == 1
    assert not bell.arm([consumer])
    assert consumer.drain() == [b"over a socket"]
    assert bell.arm([consumer])
    for thing in (bell, producer, consumer, channel, a, b):
        thing.close()


def test_auto_is_the_ring() -> None:
    a, b = create_doorbell("a"), create_doorbell("b")
    channel = create_channel("ab", producer=a, consumer=b)
    assert channel.transport == "ring"
    for thing in (channel, a, b):
        thing.close()


@pytest.mark.parametrize(("transport", "producer", "consumer"), [
    ("ring", "ring", "socket"),
    ("ring", "socket", "ring"),
    ("socket", "ring", "ring"),
    ("auto", "ring", "socket"),
])  # fmt: skip
def test_a_channel_and_its_doorbells_are_of_one_transport(transport: str, producer: str, consumer: str) -> None:
    bells = [create_doorbell(f"a {kind} one", transport=kind) for kind in (producer, consumer)]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="transport"):
        create_channel("c", producer=bells[0], consumer=bells[1], transport=transport)  # type: ignore[arg-type]
    for bell in bells:
        bell.close()


def test_auto_is_the_doorbells_transport() -> None:
    bells = [create_doorbell("a", transport="socket"), create_doorbell("b", transport="socket")]
    channel = create_channel("c", producer=bells[0], consumer=bells[1])
    assert channel.transport == "socket"
    channel.close()
    for bell in bells:
        bell.close()


def test_exported_names() -> None:
    """The public interface, on purpose; other packages import nothing else of shm."""
    assert isinstance(shm, ModuleType)
    assert sorted(shm.__all__) == sorted(
        name for name, value in vars(shm).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    )
