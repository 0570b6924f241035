"""Many clients at once: nobody's tokens depend on who else is there, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from server_process import Server

MODEL = "SmolLM2-135M-Instruct"
WORDS = [
    "the",
    "ring",
    "sings",
    "of",
    "rivers",
    "and",
    "machines",
    "while",
    "seven",
    "quiet",
    "foxes",
    "count",
    "stars",
    "above",
    "a",
    "paper",
    "city",
]


@dataclass(frozen=True)
class Case:
    """A request, and after how many chunks its client leaves (None: never)."""

    body: Mapping[str, Any]
    leaves_after: int | None = None


def make_cases(count: int) -> list[Case]:
    chance = random.Random(11)
    distinct = [
        {
            "model": MODEL,
            "prompt": " ".join(chance.choices(WORDS, k=chance.choice([1, 3, 20, 60, 150]))),
            "max_tokens": chance.randint(2, 12),
            "temperature": 0,
        }
        for _ in range(16)
    ]
    cases = [Case(distinct[index % len(distinct)]) for index in range(count)]
    for index in range(0, count, 3):
        cases[index] = Case({**cases[index].body, "max_tokens": 500, "ignore_eos": True}, chance.randint(1, 3))
    chance.shuffle(cases)
    return cases


async def ask(client: httpx.AsyncClient, case: Case) -> tuple[str, Mapping[str, int] | None]:
    """The streamed text and the usage; usage is None for a client that left."""
    body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
    text, chunks, usage = "", 0, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk["usage"] or usage
            text += "".join(choice["text"] for choice in chunk["choices"])
            chunks += 1
            if chunks == case.leaves_after:
                return text, None
    assert usage is not None
    return text, usage


async def ask_all(url: str, cases: Sequence[Case], at_once: int) -> list[tuple[str, Mapping[str, int] | None]]:
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(case: Case) -> tuple[str, Mapping[str, int] | None]:
            async with gate:
                return await ask(client, case)

        return await asyncio.gather(*map(one, cases))


def counters(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            found[sample.name + (f"/{reason}" if reason else "")] = sample.value
    return found


def integrity(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/debug/integrity", timeout=60).json())


def wait_until_empty(url: str) -> dict[str, Any]:
    """The integrity report once the cancelled requests' last messages are through."""
    deadline = time.monotonic() + 60
    while True:
        report = integrity(url)
        if is_empty(report) or time.monotonic() > deadline:
            return report
        time.sleep(0.05)


def is_empty(report: Mapping[str, Any]) -> bool:
    return bool(
        report["problems"] == []
        and report["num_free_pages"] == report["num_pages"]
        and report["scheduler_requests"] == 0
        and report["tokenizer_requests"] == 0
        and report["frontend"]["journal_entries"] == 0
    )


def descriptors(server: Server) -> dict[str, int]:
    return {role: len(list(Path(f"/proc/{pid}/fd").iterdir())) for role, pid in server.pids.items()}


def test_two_hundred_at_once_equal_each_alone(server: Server) -> None:
    cases = make_cases(200)
    alone: dict[str, str] = {}
    for case in cases:
        key = json.dumps(case.body)
        if case.leaves_after is None and key not in alone:
            ((text, _),) = asyncio.run(ask_all(server.url, [case], 1))
            alone[key] = text
    assert is_empty(wait_until_empty(server.url))
    open_before = descriptors(server)
    before = counters(server.url)

    results = asyncio.run(ask_all(server.url, cases, 200))

    stayed = [(case, *result) for case, result in zip(cases, results, strict=True) if case.leaves_after is None]
    assert len(stayed) == 133
    for case, text, _ in stayed:
        assert text == alone[json.dumps(case.body)]

    report = wait_until_empty(server.url)
    assert is_empty(report), report
    after = counters(server.url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    finished = grown["vllm:request_success_total/stop"] + grown["vllm:request_success_total/length"]
    assert finished == len(stayed)
    assert grown["vllm:request_success_total/abort"] == len(cases) - len(stayed)
    usages = [usage for _, _, usage in stayed if usage is not None]
    # the aborted ones generated as well, but at least what their clients saw
    seen = sum(usage["completion_tokens"] for usage in usages)
    seen_aborted = sum(case.leaves_after - 1 for case in cases if case.leaves_after is not None)
    assert grown["vllm:generation_tokens_total"] >= seen + seen_aborted
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    # An idle connection of the client may have been closed meanwhile: fewer is no leak.
    open_now = descriptors(server)
    assert {role: number for role, number in open_now.items() if number > open_before[role]} == {}


def test_counters_equal_what_clients_saw(server: Server) -> None:
    cases = [case for case in make_cases(60) if case.leaves_after is None]
    assert is_empty(wait_until_empty(server.url))
    before = counters(server.url)
    results = asyncio.run(ask_all(server.url, cases, 16))
    assert is_empty(wait_until_empty(server.url))
    after = counters(server.url)
    usages = [usage for _, usage in results if usage is not None]

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("vllm:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("vllm:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert grown("vllm:time_to_first_token_seconds_count") == len(cases)
    assert grown("vllm:e2e_request_latency_seconds_count") == len(cases)
    assert grown("vllm:request_prompt_tokens_sum") == sum(usage["prompt_tokens"] for usage in usages)


def test_a_seeded_request_does_not_depend_on_its_neighbours(server: Server) -> None:
    """Sampled tokens are equal bit for bit alone and among thirty others (bfloat16)."""
    seeded = Case(
        {
            "model": MODEL,
            "prompt": "The old lighthouse keeper said",
            "max_tokens": 48,
            "temperature": 0.9,
            "top_p": 0.95,
            "seed": 1234,
            "ignore_eos": True,
        }
    )
    ((alone, _),) = asyncio.run(ask_all(server.url, [seeded], 1))
    chance = random.Random(5)
    others = [
        Case(
            {
                "model": MODEL,
                "prompt": " ".join(chance.choices(WORDS, k=chance.randint(1, 90))),
                "max_tokens": chance.randint(8, 60),
                "temperature": chance.choice([0, 0.7, 1.3]),
                "ignore_eos": True,
            }
        )
        for _ in range(30)
    ]
    results = asyncio.run(ask_all(server.url, [*others[:15], seeded, *others[15:]], 31))
    assert results[15][0] == alone


def test_the_next_step_is_planned_before_the_last_one_is_back(server: Server) -> None:
    """At eight streams, by the messages' time stamps."""
    body = {"model": MODEL, "prompt": "One", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    before = counters(server.url)
    asyncio.run(ask_all(server.url, [Case({**body, "prompt": f"{n} rings"}) for n in range(8)], 8))
    after = counters(server.url)
    steps = after["ringserve_steps_total"] - before["ringserve_steps_total"]
    overlapped = after["ringserve_steps_overlapped_total"] - before["ringserve_steps_overlapped_total"]
    assert steps >= 60
    assert overlapped >= 0.9 * steps


def test_a_huge_prompt_among_streams(server: Server) -> None:
    """A megabyte of text is encoded beside eight streams, ten are refused without encoding; the streams go on."""

    async def scenario() -> tuple[list[httpx.Response], list[tuple[str, Mapping[str, int] | None]]]:
        body = {"model": MODEL, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            streams = asyncio.ensure_future(
                asyncio.gather(*(ask(client, Case({**body, "prompt": f"{n} rings"})) for n in range(8)))
            )
            huge = [
                await client.post("/v1/completions", json={"model": MODEL, "prompt": "ring " * (size // 5)})
                for size in (300_000, 10_000_000)
            ]
            return huge, await streams

    huge, streams = asyncio.run(scenario())
    assert [response.status_code for response in huge] == [400, 400]
    assert all("maximum context length is 4096 tokens" in response.json()["error"]["message"] for response in huge)
    assert all(usage is not None and usage["completion_tokens"] == 40 for _, usage in streams)


def test_a_client_that_stops_reading_harms_nobody(server: Server) -> None:
    async def scenario() -> list[tuple[str, Mapping[str, int] | None]]:
        port = httpx.URL(server.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        body = json.dumps(
            {"model": MODEL, "prompt": "One", "max_tokens": 2000, "stream": True, "ignore_eos": True, "n": 4}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await reader.readuntil(b"data: ")
        results = await ask_all(server.url, [case for case in make_cases(30) if case.leaves_after is None], 10)
        writer.close()
        return results

    results = asyncio.run(scenario())
    assert all(usage is not None and usage["completion_tokens"] > 0 for _, usage in results)
    report = wait_until_empty(server.url)
    assert is_empty(report), report
