"""Large bodies: decoded as msgspec decodes them, with turns of the loop in between."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.frontend import large_bodies, parsing
from ringserve.frontend.errors import ApiError
from ringserve.frontend.large_bodies import MAX_ITEMS, PIECE
from ringserve.frontend.protocol import ChatCompletionBody, DetokenizeBody

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6), max_leaves=60
)


async def _turns_and(coroutine: Any) -> tuple[int, Any]:
    """How often another task ran until it was done, and its result."""
    task, turns = asyncio.ensure_future(coroutine), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    return turns, task.result()


@settings(max_examples=300, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 0, 3]), piece=st.sampled_from([0, 1, 2, 7, 40]))
def test_any_json_is_decoded_as_at_once(value: Any, indent: int | None, piece: int) -> None:
    data = b" \n" + json.dumps(value, indent=indent, ensure_ascii=False).encode() + b"\t "
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies, "PIECE", piece)
        found = asyncio.run(large_bodies.decode(data))
    expected = msgspec.json.decode(data)
    assert found == expected
    assert repr(found) == repr(expected)  # 1 is not 1.0, nor True


@settings(max_examples=300, deadline=None)
@given(
    value=VALUES, piece=st.sampled_from([0, 1, 7]), place=st.integers(0, 10**6), byte=st.sampled_from(b'[]{},":x0\xff')
)
def test_whatever_is_wrong_is_wrong_in_pieces(value: Any, piece: int, place: int, byte: int) -> None:
    data = bytearray(json.dumps(value, ensure_ascii=False).encode())
    data[place % len(data)] = byte
    try:
        expected = msgspec.json.decode(bytes(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        expected = msgspec.DecodeError
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies, "PIECE", piece)
        try:
            found = asyncio.run(large_bodies.decode(bytes(data)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = msgspec.DecodeError
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", list(range(400_000))),
        ("prompt", [list(range(200_000))] * 2),
        ("messages", [{"role": "user", "content": "some words " * 20}] * 10_000),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "words"}] * 60_000}]),
        ("logit_bias", {str(i): 1.0 for i in range(100_000)}),
    ],
)
def test_others_have_their_turns(name: str, value: Any) -> None:
    """About one for each piece, wherever in the body its bulk lies."""
    data = json.dumps({"model": "m", name: value}).encode()
    turns, body = asyncio.run(_turns_and(large_bodies.decode(data)))
    assert body == {"model": "m", name: value}
    assert turns >= len(data) // PIECE // 2


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}] * (MAX_ITEMS + 1)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * (MAX_ITEMS + 1)}]},
    ],
)
def test_more_messages_or_parts_than_are_worked_off_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"{MAX_ITEMS + 1} values; at most {MAX_ITEMS}") as caught:
        asyncio.run(parsing.parse(json.dumps(body).encode(), ChatCompletionBody))
    assert caught.value.status == 400


def test_a_large_body_is_checked_as_any_other() -> None:
    ids = list(range(400_000))
    parsed = asyncio.run(parsing.parse(json.dumps({"tokens": ids}).encode(), DetokenizeBody))
    assert parsed.tokens == ids
    for data, words in (
        (json.dumps({"tokens": [*ids, 0.5]}).encode(), r"tokens\[400000\]"),
        (json.dumps({"tokens": ids}).encode() + b"x", "could not parse the JSON"),
        (json.dumps({"tokens": ids}).encode()[:-2], "could not parse the JSON"),
        (json.dumps([ids]).encode(), "must be a JSON object, not list"),
        (b'{"tokens": ' + b"[" * 2_000_000, "could not parse|nested too deeply"),
        (b" " * 2_000_000, "could not parse the JSON"),
    ):
        with pytest.raises(ApiError, match=words):
            asyncio.run(parsing.parse(data, DetokenizeBody))
