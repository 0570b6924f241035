"""Greedy output through HTTP with streaming equals ``transformers``' ``generate`` (float32), one by one and at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import httpx
import pytest
from reference import NEW_TOKENS, Reference, assert_equal_but_for_ties
from server_process import Server

MODEL = "SmolLM2-135M-Instruct"

pytestmark = pytest.mark.timeout(1200)


async def stream_ids(client: httpx.AsyncClient, prompt: Sequence[int]) -> list[int]:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice["token_ids"]
    return ids


def test_greedy_streams_equal_generate(references: list[Reference]) -> None:
    async def scenario(url: str) -> list[list[int]]:
        async with httpx.AsyncClient(base_url=url, timeout=900) as client:
            return await asyncio.gather(*(stream_ids(client, reference.prompt) for reference in references))

    with Server("--dtype", "float32", "--max-model-len", "2048") as server:
        got = asyncio.run(scenario(server.url))
        assert server.stop() == 0
    assert_equal_but_for_ties(references, got)
