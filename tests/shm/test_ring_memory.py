"""The ring's memory: layout, seals, permissions, and who may attach."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import os
import stat
import struct

import pytest
from shm_workshop import Link, Workshop

from ringserve.shm import AttachError, Consumer, Producer, _ring, bell_page, create_doorbell
from ringserve.shm.channel import RingCarrier
from ringserve.shm.descriptors import Descriptor, create_sealed_memfd

CAPACITY = 1 << 16
COUNTERS = ("BELL_ARMS", "BELL_REFUSED_ARMS", "BELL_WAITS", "BELL_WAKES", "BELL_SPURIOUS_WAKES", "BELL_SPINS")
OFFSETS = {name: offset for name, (offset, _, _) in _ring.LAYOUT.items()}


def carrier(link: Link) -> RingCarrier:
    found = link.channel.producer_end.carrier
    assert isinstance(found, RingCarrier)
    return found


def test_fields_do_not_overlap_and_writers_keep_apart() -> None:
    """Lines of different processes lie 128 bytes apart, but for the one that both touch when the ring is full."""
    for prefix, kinds in (("RING_", {"creator", "producer", "consumer"}), ("BELL_", {"creator", "owner", "both"})):
        rows = sorted(row for name, row in _ring.LAYOUT.items() if name.startswith(prefix))
        for (offset, size, _), (following, _, _) in itertools.pairwise(rows):
            assert offset + size <= following
        assert all(offset % size == 0 for offset, size, _ in rows)
        assert rows[-1][0] + rows[-1][1] <= 4096
        groups = {kind: {offset // 128 for offset, _, writer in rows if writer == kind} for kind in kinds}
        want = {OFFSETS["RING_WANT_SPACE"] // 128} if prefix == "RING_" else set()
        flat = [line for lines in groups.values() for line in lines - want]
        assert len(flat) == len(set(flat))


def test_python_and_c_agree_on_the_doorbell_page() -> None:
    in_python = {
        "BELL_MAGIC": bell_page.MAGIC,
        "BELL_LAYOUT_VERSION": bell_page.VERSION,
        "BELL_ASLEEP": bell_page.ASLEEP,
        "BELL_HEARTBEAT_NS": bell_page.HEARTBEAT_NS,
        "BELL_PHASE": bell_page.PHASE,
        "BELL_PID": bell_page.PID,
        **{name: bell_page.COUNTERS + 8 * index for index, name in enumerate(COUNTERS)},
    }
    assert in_python == {name: offset for name, offset in OFFSETS.items() if name.startswith("BELL_")}
    assert bell_page.LAYOUT_VERSION == _ring.LAYOUT_VERSION


def test_segments_are_private_sealed_and_allocated(ring_workshop: Workshop) -> None:
    link = ring_workshop.link(CAPACITY)
    for fd in (carrier(link).segment.fileno(), link.channel.producer_end.peer.filenos()[0]):
        status = os.fstat(fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_blocks * 512 >= status.st_size, "memory is taken at the start"
        assert not os.get_inheritable(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        for length in (0, status.st_size - 1, status.st_size + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
    assert os.fstat(carrier(link).segment.fileno()).st_size == 4096 + CAPACITY


def test_header_and_first_frame_are_where_the_layout_says(ring_workshop: Workshop) -> None:
    link = ring_workshop.link(CAPACITY)
    link.producer.put_nowait(b"hello")
    link.producer.put_nowait(b"world, again")
    link.producer.flush()
    image = os.pread(carrier(link).segment.fileno(), 4096 + CAPACITY, 0)
    assert image[:8] == b"rsvring1"
    version, data_offset, capacity, max_frame, ring_id, session_id = struct.unpack_from("=IIQIIQ", image, 8)
    assert (version, data_offset, capacity, max_frame) == (_ring.LAYOUT_VERSION, 4096, CAPACITY, CAPACITY // 8)
    assert (ring_id, session_id) == (carrier(link).ring_id, carrier(link).session_id)
    assert struct.unpack_from("=Q", image, OFFSETS["RING_TAIL"]) == (16 + 24,)
    assert struct.unpack_from("=IBBH5s", image, 4096) == (5, 0, 0, 0, b"hello")
    assert struct.unpack_from("=IBBH12s", image, 4096 + 16) == (12, 0, 0, 1, b"world, again")
    assert struct.unpack_from("=Q", image, OFFSETS["RING_PROD_MESSAGES"]) == (2,)
    link.consumer.drain()
    image = os.pread(carrier(link).segment.fileno(), 4096, 0)
    assert struct.unpack_from("=QQQ", image, OFFSETS["RING_HEAD"]) == (40, 2, 17)


def test_each_end_is_attached_once(ring_workshop: Workshop) -> None:
    link = ring_workshop.link(CAPACITY)
    with pytest.raises(AttachError, match="attached before"):
        Producer.attach(link.channel.producer_end)
    link.consumer.close()
    with pytest.raises(AttachError, match="attached before"):
        Consumer.attach(link.channel.consumer_end)


@pytest.mark.parametrize(
    ("field", "value"), [("ring_id", 1), ("session_id", 1), ("capacity", CAPACITY * 2), ("max_frame", 4096)]
)
def test_another_channels_segment_is_refused(ring_workshop: Workshop, field: str, value: int) -> None:
    a, b = ring_workshop.doorbell("a"), ring_workshop.doorbell("b")
    channel = ring_workshop.channel("ab", a, b, CAPACITY)
    end = channel.producer_end
    assert isinstance(end.carrier, RingCarrier)
    agreed = {name: getattr(end.carrier, name) for name in ("capacity", "max_frame", "ring_id", "session_id")}
    wrong = RingCarrier(end.carrier.segment, **(agreed | {field: value}))
    with pytest.raises(AttachError):
        Producer.attach(dataclasses.replace(end, carrier=wrong))
    ring_workshop.keep(Producer.attach(end))


@pytest.mark.parametrize("field", ["RING_MAGIC", "RING_LAYOUT_VERSION", "RING_DATA_OFFSET", "RING_CAPACITY"])
def test_a_header_that_does_not_match_is_refused(ring_workshop: Workshop, field: str) -> None:
    a, b = ring_workshop.doorbell("a"), ring_workshop.doorbell("b")
    channel = ring_workshop.channel("ab", a, b, CAPACITY)
    assert isinstance(channel.consumer_end.carrier, RingCarrier)
    os.pwrite(channel.consumer_end.carrier.segment.fileno(), b"\x55", OFFSETS[field])
    with pytest.raises(AttachError):
        Consumer.attach(channel.consumer_end)


def test_unsealed_and_short_files_are_refused(ring_workshop: Workshop) -> None:
    a, b = ring_workshop.doorbell("a"), ring_workshop.doorbell("b")
    good = ring_workshop.channel("ab", a, b, CAPACITY).producer_end
    assert isinstance(good.carrier, RingCarrier)
    unsealed = Descriptor(os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(unsealed.fileno(), 4096 + CAPACITY)
    short = Descriptor(create_sealed_memfd("short", 4096))
    null = Descriptor(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    for wrong in (unsealed, short, null):
        with pytest.raises(AttachError):
            Producer.attach(dataclasses.replace(good, carrier=dataclasses.replace(good.carrier, segment=wrong)))
        wrong.close()


def test_objects_are_not_attached_twice(ring_workshop: Workshop) -> None:
    link = ring_workshop.link(CAPACITY)
    assert isinstance(link.producer, _ring.RingProducer)
    found = carrier(link)
    bell = _ring.Bell(*link.channel.producer_end.peer.filenos())
    with pytest.raises(AttachError):
        link.producer.__init__(  # type: ignore[misc]  # calling it again is the misuse under test
            "again", found.segment.fileno(), bell, CAPACITY, CAPACITY // 8, found.ring_id, found.session_id
        )
    with pytest.raises(AttachError):
        bell.__init__(*link.channel.producer_end.peer.filenos())  # type: ignore[misc]  # as above
    with pytest.raises(TypeError):
        _ring.Bell(page_fd=0, event_fd=0)  # type: ignore[call-arg]  # positional only
    bell.close()


def test_pages_of_strangers_are_no_doorbells() -> None:
    handle = create_doorbell("x")
    _, event = handle.filenos()
    page = Descriptor(create_sealed_memfd("page", 4096))
    with pytest.raises(AttachError):
        _ring.Bell(page.fileno(), event)
    null = Descriptor(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    with pytest.raises(AttachError):
        _ring.Bell(null.fileno(), event)
    for thing in (page, null, handle):
        thing.close()
