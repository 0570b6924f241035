"""Many streams in a pool that holds a few: what is preempted comes back from the host, and nobody's text shows it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import Server
from tiny_model import save_tiny_model

NUM_STREAMS = 16
PAGE = 2 * 2 * 2 * 16 * 8 * 4
"""Bytes: layers, keys and values, heads, dimensions, tokens, float32."""
COMMON = ("--dtype", "float32", "--block-size", "8", "--max-model-len", "256", "--threads", "1", "--debug-endpoints")

pytestmark = pytest.mark.timeout(300)


async def stream(client: httpx.AsyncClient, number: int) -> str:
    """Half of them greedy, the others drawn with penalties."""
    body = {"prompt": f"stream {number}: ", "max_tokens": 120, "stream": True, "ignore_eos": True, "temperature": 0}
    if number % 2:
        body |= {"temperature": 0.8, "seed": number, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def everything(url: str) -> tuple[list[str], dict[str, float], dict[str, object]]:
    """All texts, the metrics afterwards, and what the audit says."""
    async with httpx.AsyncClient(base_url=url, timeout=200) as client:
        texts = await asyncio.gather(*(stream(client, number) for number in range(NUM_STREAMS)))
        exposition = (await client.get("/metrics")).text
        audit = (await client.get("/debug/integrity")).json()
    families = text_string_to_metric_families(exposition)
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    return texts, samples, audit


def test_streams_do_not_show_that_they_were_swapped(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path))
    with Server(model, *COMMON) as server:
        expected, samples, _ = asyncio.run(everything(server.url))
        assert server.stop() == 0
    assert samples["vllm:num_preemptions_total"] == samples["ringserve_pages_swapped_out_total"] == 0
    assert samples["ringserve_swap_space_pages"] == 0  # on CPUs nothing is swapped unless it is asked for

    small = ("--kv-cache-memory", str(48 * PAGE), "--swap-space", "64M", "--no-enable-prefix-caching")
    with Server(model, *COMMON, *small) as server:
        texts, samples, audit = asyncio.run(everything(server.url))
        assert server.stop() == 0
        log = server.output()
    assert texts == expected
    assert samples["ringserve_swap_space_pages"] == (64 << 20) // PAGE
    assert samples["vllm:num_preemptions_total"] > 3
    assert samples["ringserve_pages_swapped_in_total"] == samples["ringserve_pages_swapped_out_total"] > 10
    assert samples["ringserve_swapped_tokens_total"] > 100
    assert samples["ringserve_preempted_tokens_total"] == 0
    assert samples["ringserve_swapped_pages"] == 0
    assert audit["problems"] == []
    assert "brought back from the host" in log
