"""The load generator and its HTTP client against servers that behave, and against every kind that does not."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from itertools import islice

import fake_openai as fake
import pytest
import uvloop
from fake_openai import Behaviour, FakeOpenAI

from ringserve.bench.bodies import BodyBuilder
from ringserve.bench.http_client import Endpoint, Exchange, HttpClient
from ringserve.bench.lengths import Lengths
from ringserve.bench.load import ClosedLoop, LoadGenerator, OpenLoop, Prepared
from ringserve.bench.prompts import Job, RandomPrompts, TokenIds, Turn
from ringserve.bench.records import RequestRecord, Usage

PROMPTS = RandomPrompts(TokenIds(1, 100), Lengths.parse("5"), Lengths.parse("4"))


def prepared(generator: LoadGenerator, count: int) -> Iterator[Prepared]:
    return map(generator.prepare, islice(PROMPTS.jobs("test"), count))


def load(
    url: str, count: int, pace: ClosedLoop | OpenLoop, *, timeout: float = 20.0, duration: float | None = None
) -> tuple[list[RequestRecord], HttpClient]:
    client = HttpClient(Endpoint.parse(url))
    generator = LoadGenerator(client, BodyBuilder("completions", "fake"), timeout=timeout)

    async def run() -> None:
        await generator.run(prepared(generator, count), pace, duration)
        client.close()

    uvloop.run(run())
    return generator.records, client


def converse(url: str, job: Job) -> list[RequestRecord]:
    client = HttpClient(Endpoint.parse(url))
    generator = LoadGenerator(client, BodyBuilder("chat", "fake"), timeout=20.0)

    async def run() -> None:
        await generator.run(iter([generator.prepare(job)]), ClosedLoop(1))
        client.close()

    uvloop.run(run())
    return generator.records


def ask(behaviour: Behaviour, *, timeout: float = 20.0) -> RequestRecord:
    with FakeOpenAI(behaviour) as server:
        (record,), _ = load(server.url, 1, ClosedLoop(1), timeout=timeout)
        return record


def test_a_good_stream() -> None:
    record = ask(fake.good)
    assert record.failure is None
    assert record.usage == Usage(5, 4)
    assert record.finish_reason == "length"
    assert record.asked_prompt_tokens == 5
    assert len(record.chunk_times) == 4
    moments = [record.due, record.sent, *record.chunk_times, record.ended]
    assert moments == sorted(moments)
    assert record.chunk_times[-1] > record.chunk_times[0]


@pytest.mark.parametrize("behaviour", [fake.without_done, fake.until_close])
def test_other_ways_to_end_well(behaviour: Behaviour) -> None:
    record = ask(behaviour)
    assert record.failure is None
    assert len(record.chunk_times) == 1
    assert record.usage is None


def test_several_tokens_in_a_chunk() -> None:
    assert ask(fake.counted_pairs).chunk_tokens == [2, 2]
    uncounted = ask(fake.pairs)
    assert uncounted.chunk_tokens is None
    assert (len(uncounted.chunk_times), uncounted.usage) == (2, Usage(5, 4))


@pytest.mark.parametrize(
    ("behaviour", "kind", "words", "chunks"),
    [
        (fake.overloaded, "http_503", "The queue is full.", 0),
        (fake.bad_request, "http_400", "no such field", 0),
        (fake.broken, "http_500", "Internal Server Error", 0),
        (fake.reset, "connection_reset", "", 0),
        (fake.close, "disconnected", "before an answer", 0),
        (fake.cut, "truncated", "in the middle", 1),
        (fake.cut_quietly, "truncated", "without a finish reason", 1),
        (fake.malformed, "malformed", "choices", 1),
        (fake.wrong_types, "malformed", "Expected `array", 0),
        (fake.html, "malformed", "It works!", 0),
        (fake.error_frame, "server_error", "The executor died.", 1),
        (fake.empty, "empty", "without any output", 0),
        (fake.no_http, "invalid_http", "", 0),
        (fake.upgrade, "invalid_http", "", 0),
        (fake.redirect, "http_307", "redirected to https://elsewhere/v1", 0),
        (fake.nested, "malformed", "recursion", 1),
        (fake.nested_refusal, "http_503", "[[[", 0),
        (fake.impossible_counts, "malformed", "completion_tokens", 1),
    ],
)
def test_what_goes_wrong_is_told(behaviour: Behaviour, kind: str, words: str, chunks: int) -> None:
    record = ask(behaviour)
    assert record.failure is not None
    assert record.failure.kind == kind
    assert words in record.failure.message
    assert len(record.chunk_times) == chunks
    assert record.ended >= record.sent


@pytest.mark.parametrize(("behaviour", "chunks"), [(fake.hang, 0), (fake.hang_midway, 2)])
def test_a_hang_ends_at_the_timeout(behaviour: Behaviour, chunks: int) -> None:
    record = ask(behaviour, timeout=0.3)
    assert record.failure is not None
    assert record.failure.kind == "timeout"
    assert len(record.chunk_times) == chunks
    assert record.ended - record.sent >= 0.29


def test_nothing_listens() -> None:
    with FakeOpenAI() as server:
        url = server.url
    (record,), _ = load(url, 1, ClosedLoop(1))
    assert record.failure is not None
    assert record.failure.kind == "connection_refused"


def test_an_unknown_host() -> None:
    (record,), _ = load("http://nowhere.invalid:1/v1", 1, ClosedLoop(1))
    assert record.failure is not None
    assert record.failure.kind == "connection_failed"


def test_failures_do_not_stop_the_rest() -> None:
    with FakeOpenAI(fake.good, fake.reset, fake.overloaded, fake.cut) as server:
        records, _ = load(server.url, 12, ClosedLoop(2))
    kinds = sorted(record.failure.kind if record.failure else "" for record in records)
    assert len(kinds) == 12
    assert set(kinds) == {"", "connection_reset", "http_503", "truncated"}
    assert kinds.count("") >= 3  # a reset of a kept connection is answered by a second try


def test_connections_are_kept() -> None:
    with FakeOpenAI() as server:
        records, client = load(server.url, 8, ClosedLoop(2))
        assert all(record.failure is None for record in records)
        assert sorted(call.number_on_connection for call in server.calls)[-1] >= 3
    assert client.num_retries == 0


def test_a_connection_closed_while_idle_is_replaced() -> None:
    with FakeOpenAI(fake.once_per_connection) as server:
        records, client = load(server.url, 4, ClosedLoop(1))
    assert [record.failure for record in records] == [None] * 4
    assert client.num_retries == 3


def test_closed_loop_keeps_the_concurrency() -> None:
    with FakeOpenAI() as server:
        records, _ = load(server.url, 12, ClosedLoop(3))
    assert _most_at_once(records) == 3


def test_open_loop_does_not_wait() -> None:
    with FakeOpenAI() as server:
        records, _ = load(server.url, 6, OpenLoop(iter([0.0] * 6)))
        assert _most_at_once(records) == 6
        held_back, _ = load(server.url, 6, OpenLoop(iter([0.0] * 6), max_concurrency=2))
        assert _most_at_once(held_back) == 2
    assert max(record.sent - record.due for record in held_back) > 0


def test_open_loop_keeps_the_times() -> None:
    times = [0.0, 0.05, 0.06, 0.15]
    with FakeOpenAI() as server:
        records, _ = load(server.url, 9, OpenLoop(iter(times)))
    due = sorted(record.due for record in records)
    assert [moment - due[0] for moment in due] == pytest.approx(times)
    assert all(record.sent >= record.due - 0.002 for record in records)  # uvloop's timers are in whole milliseconds


def test_a_duration_ends_a_load_without_end() -> None:
    with FakeOpenAI() as server:
        started = time.perf_counter()
        records, _ = load(server.url, 10**9, ClosedLoop(2), duration=0.3)
    assert all(record.failure is None for record in records)
    assert max(record.sent for record in records) <= started + 0.3 + 1.0
    assert len(records) >= 2


@pytest.mark.parametrize("times", [itertools.repeat(0.0), itertools.count(0.0, 1e-5)])
def test_a_schedule_that_cannot_be_kept_ends_with_its_duration(times: Iterator[float]) -> None:
    """The answers get their turn meanwhile; what could not be sent in time is not sent afterwards."""
    with FakeOpenAI() as server:
        started = time.perf_counter()
        records, _ = load(server.url, 10**9, OpenLoop(times, max_concurrency=4), duration=0.3)
        took = time.perf_counter() - started
    assert took < 10
    assert all(record.failure is None for record in records)
    assert len(records) >= 4
    assert max(record.sent for record in records) <= started + 0.3 + 1.0


@pytest.mark.parametrize("think_time", [0.0, 0.1])
def test_a_duration_ends_conversations(think_time: float) -> None:
    job = Job(tuple(Turn("again", 2) for _ in range(1000)))
    with FakeOpenAI() as server:
        client = HttpClient(Endpoint.parse(server.url))
        generator = LoadGenerator(client, BodyBuilder("chat", "fake"), timeout=20.0, think_time=think_time)

        async def run() -> None:
            await generator.run(iter([generator.prepare(job)]), ClosedLoop(1), 0.25)
            client.close()

        started = time.perf_counter()
        uvloop.run(run())
        assert time.perf_counter() - started < 2
    assert 1 <= len(generator.records) < 200
    assert all(record.failure is None for record in generator.records)


def test_turns_carry_the_answers() -> None:
    job = Job((Turn("one", 2), Turn("two", 3), Turn("three", 1)))
    with FakeOpenAI() as server:
        records = converse(server.url, job)
        said = [message["content"] for message in server.calls[2].body["messages"]]
    assert said == ["one", " tok tok", "two", " tok tok tok", "three"]
    assert [record.turn for record in records] == [0, 1, 2]


def test_a_failed_turn_ends_its_conversation() -> None:
    job = Job((Turn("one", 2), Turn("two", 3)))
    with FakeOpenAI(fake.overloaded) as server:
        records = converse(server.url, job)
    assert len(records) == 1


def test_stopping_records_what_was_in_flight() -> None:
    async def run(generator: LoadGenerator) -> None:
        running = asyncio.create_task(generator.run(prepared(generator, 50), ClosedLoop(3)))
        while len(server.calls) < 4:  # one good answer, then three hang
            await asyncio.sleep(0.01)
        generator.stop()
        await running
        client.close()

    with FakeOpenAI(fake.good, fake.hang, fake.hang, fake.hang) as server:
        client = HttpClient(Endpoint.parse(server.url))
        generator = LoadGenerator(client, BodyBuilder("completions", "fake"), timeout=20.0)
        uvloop.run(run(generator))
    kinds = [record.failure.kind if record.failure else "" for record in generator.records]
    assert sorted(kinds) == ["", "interrupted", "interrupted", "interrupted"]


def test_headers() -> None:
    with FakeOpenAI() as server:
        client = HttpClient(Endpoint.parse(server.url, "secret"))

        async def run() -> None:
            await client.post("/completions", b'{"max_tokens": 1}', 20.0, Exchange(time.perf_counter()))
            client.close()

        uvloop.run(run())
        assert server.calls[0].headers["authorization"] == "Bearer secret"
        assert server.calls[0].headers["host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://a:9", "http://a:9/v1"),
        ("a:9/", "http://a:9/v1"),
        ("https://a/openai/v1/", "https://a:443/openai/v1"),
        ("http://[::1]:9/v1", "http://[::1]:9/v1"),
        ("http://b\u00fccher.example/v\u00e4", "http://xn--bcher-kva.example:80/v%C3%A4"),
        ("http://a:9/with space/%20", "http://a:9/with%20space/%20"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert Endpoint.parse(url).url == base


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:port", "http://a..b/v1", f"http://{'a' * 64}/v1"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError):
        Endpoint.parse(url)


def _most_at_once(records: list[RequestRecord]) -> int:
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
