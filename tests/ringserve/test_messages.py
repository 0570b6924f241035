"""The vocabulary as a whole: nothing that no ring carries, nothing on a ring that is not meant for it."""

from __future__ import annotations

import importlib
import pkgutil
import struct
from typing import Any, get_args

import msgspec
import pytest

from ringserve import messages
from ringserve.messages.columns import pack_f32, pack_i32, pack_u64, unpack_f32, unpack_i32, unpack_u64
from ringserve.messages.prompts import Prompt
from ringserve.messages.rings import RINGS
from ringserve.messages.startup import SupervisorInbound
from ringserve.messages.structs import Message, Part


def subclasses(of: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    """Those in the package's modules."""
    for module in pkgutil.iter_modules(messages.__path__, f"{messages.__name__}."):
        importlib.import_module(module.name)
    return {found for found in of.__subclasses__() if found.__module__.startswith(f"{messages.__name__}.")}


def members(union: Any) -> set[type[msgspec.Struct]]:
    """Of a union, or of one message."""
    return set(get_args(union) or [union])


def test_every_message_is_on_a_ring_or_for_the_supervisor() -> None:
    travelling = set().union(*map(members, RINGS.values()))
    assert travelling | members(SupervisorInbound) | members(Prompt) == subclasses(Message)


@pytest.mark.parametrize("ring", RINGS, ids=">".join)
def test_a_ring_takes_its_own_messages_only(ring: tuple[str, str]) -> None:
    decoder = msgspec.msgpack.Decoder(RINGS[ring])
    own = {kind.__name__ for kind in members(RINGS[ring])}
    assert own
    taken = set()
    for kind in subclasses(Message):
        with pytest.raises(msgspec.ValidationError) as caught:  # no message begins with an optional field
            decoder.decode(msgspec.msgpack.encode([kind.__name__, *[None] * 20]))
        if "$[1]" in str(caught.value):  # past the tag
            taken.add(kind.__name__)
        else:
            assert str(caught.value) == f"Invalid value '{kind.__name__}' - at `$[0]`"
    assert taken == own


def test_all_are_immutable_arrays_without_unknown_fields() -> None:
    for kind in subclasses(Message) | subclasses(Part):
        options = kind.__struct_config__
        assert (options.frozen, options.array_like, options.forbid_unknown_fields) == (True, True, True), kind
        assert options.tag == (kind.__name__ if issubclass(kind, Message) else None)


def test_columns_keep_their_numbers() -> None:
    integers, floats = [0, -1, 7, 2**31 - 1, -(2**31)], [0.5, -9999.0, 3.0]
    assert unpack_i32(pack_i32(integers)).tolist() == integers
    assert unpack_u64(pack_u64([0, 2**64 - 1])).tolist() == [0, 2**64 - 1]
    assert unpack_f32(pack_f32(floats)).tolist() == floats
    assert (pack_i32([1, 2]), pack_u64([3]), pack_f32([0.25])) == (
        struct.pack("=2i", 1, 2),
        struct.pack("=Q", 3),
        struct.pack("=f", 0.25),
    )
    for pack, value in ((pack_i32, 2**31), (pack_u64, -1), (pack_u64, 2**64)):
        with pytest.raises(OverflowError):
            pack([value])
    with pytest.raises(TypeError):
        unpack_i32(b"123")
