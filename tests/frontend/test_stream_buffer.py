"""Buffers between the doorbell's reader and the answering tasks."""

from __future__ import annotations

import asyncio

import pytest

from ringserve.frontend.errors import ApiError, ClientGone
from ringserve.frontend.stream import ChoiceOutput, OutputCollector, OutputStream
from ringserve.messages.text_outputs import TextFinish

END = TextFinish(0, "stop", None, 1)


def piece(text: str, choice: int = 0, finish: TextFinish | None = None) -> ChoiceOutput:
    return ChoiceOutput(choice, text, [1], (), None, finish)


def test_a_stream_is_woken_once_for_each_drain() -> None:
    async def run() -> list[list[str]]:
        stream = OutputStream(1, 10_000, lambda: None)
        drains: list[list[str]] = []

        async def read() -> None:
            while not stream.finished:
                drains.append([output.text for output in await stream.take()])

        reader = asyncio.ensure_future(read())
        for texts in (("a", "b", "c"), ("d",)):
            await asyncio.sleep(0)
            for text in texts:
                assert stream.put(piece(text))
            stream.wake()
            stream.wake()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        stream.put(piece("e", finish=END))
        stream.wake()
        await reader
        return drains

    assert asyncio.run(run()) == [["a", "b", "c"], ["d"], ["e"]]


def test_a_stream_is_bounded_and_empties_itself() -> None:
    async def run() -> None:
        overflows: list[int] = []
        stream = OutputStream(1, 1000, lambda: overflows.append(1))
        assert stream.put(piece("x" * 100))
        assert not stream.put(piece("x" * 200))
        assert overflows == [1]
        stream.fail(ClientGone())
        with pytest.raises(ClientGone):
            await stream.take()
        fresh = OutputStream(1, 1000, lambda: None)
        for _ in range(10):
            assert fresh.put(piece("x" * 100))
            await fresh.take()
            assert fresh.size == 0

    asyncio.run(run())


def test_what_came_before_an_error_is_still_handed_on() -> None:
    async def run() -> None:
        stream = OutputStream(2, 1000, lambda: None)
        stream.put(piece("a"))
        stream.fail(ApiError(500, "broken"))
        assert [output.text for output in await stream.take()] == ["a"]
        with pytest.raises(ApiError):
            await stream.take()

    asyncio.run(run())


def test_a_collector_wakes_when_all_choices_have_ended() -> None:
    async def run() -> None:
        collector = OutputCollector(2)
        reader = asyncio.ensure_future(collector.all())
        await asyncio.sleep(0)
        for output in (piece("a"), piece("x", 1, END), piece("b")):
            collector.put(output)
            collector.wake()
            await asyncio.sleep(0)
            assert not reader.done()
        collector.put(piece("c", finish=END))
        collector.wake()
        first, second = await reader
        assert ("".join(first.texts), "".join(second.texts)) == ("abc", "x")
        assert first.token_ids == [1, 1, 1]

    asyncio.run(run())
