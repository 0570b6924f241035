"""Conversations on real servers: what their next turns compute, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_process import Server
from tiny_model import save_tiny_model

PROMPT = [3 + 7 * i % 250 for i in range(70)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    options = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--block-size", "16")
    with Server(str(model), *options, "--api-key", "one", "--api-key", "two", "--debug-endpoints") as running:
        yield running
        assert running.stop() == 0, running.output()


def client(server: Server, key: str = "one") -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


def ask(http: httpx.Client, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """(answer's token ids, cached tokens)"""
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    return content["choices"][0]["token_ids"], content["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_next_turn_computes_only_its_new_tokens(tiny: Server) -> None:
    with client(tiny) as http:
        first, cached = ask(http, PROMPT, session_id="talk", cache_salt="a")
        assert cached == 0
        said = PROMPT + first
        for length in (3, 40):
            prompt = said + PROMPT[:length]
            answer, cached = ask(http, prompt, session_id="talk", cache_salt="a")
            assert cached == len(said) - 1  # the last token drawn was never computed
            assert (answer, 0) == ask(http, prompt, cache_salt=f"alone {length}")  # and nothing else is different
            said = prompt + answer
        (kept,) = http.get("/v1/sessions").json()["data"]
        assert (kept["id"], kept["tokens"]) == ("talk", len(said) - 1)
        assert kept["pages"] == -(-kept["tokens"] // 16)
        assert 0 <= kept["idle"] <= kept["age"]
        assert 0 < kept["expires_in"] <= 600
        assert "ringserve_sessions{" in http.get("/metrics").text
        assert http.delete("/v1/sessions/talk").json()["deleted"]
        assert http.delete("/v1/sessions/talk").status_code == 404
        assert http.get("/v1/sessions").json()["data"] == []
        prompt = said + PROMPT[:3]
        assert ask(http, prompt, session_id="talk", cache_salt="a")[1] == (len(said) - 1) // 16 * 16
        assert http.delete("/v1/sessions/talk").status_code == 200


def test_a_stop_string_ends_a_turn_and_keeps_it(tiny: Server) -> None:
    with client(tiny) as http:
        whole, _ = ask(http, PROMPT, max_tokens=30, cache_salt="b")
        stop = http.post("/detokenize", json={"tokens": whole[10:12]}).json()["prompt"]
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stop": [stop]}
        answer = http.post("/v1/completions", json={**body, "session_id": "stop", "cache_salt": "c"}).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        (kept,) = http.get("/v1/sessions").json()["data"]
        assert kept["tokens"] >= len(PROMPT)
        assert http.delete("/v1/sessions/stop").status_code == 200


def test_sessions_are_their_keys(tiny: Server) -> None:
    with client(tiny) as one, client(tiny, "two") as two:
        ask(one, PROMPT[:9], session_id="mine", max_tokens=2)
        assert two.get("/v1/sessions").json()["data"] == []
        assert two.delete("/v1/sessions/mine").status_code == 404
        assert ask(two, PROMPT[:9] + [5] * 5, session_id="mine", max_tokens=2)[1] == 0
        assert len(one.get("/v1/sessions").json()["data"]) == 1
        for http in (one, two):
            assert http.delete("/v1/sessions/mine").status_code == 200


def test_nothing_is_left(tiny: Server) -> None:
    with client(tiny) as http:
        report = http.get("/debug/integrity").json()
    assert report["problems"] == []
    assert report["num_free_pages"] == report["num_pages"]


def test_a_chat(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        messages = [{"role": "user", "content": "Name three colours of the rainbow, nothing else, please."}]
        body = {"max_tokens": 12, "temperature": 0, "session_id": "chat", "cache_salt": "sessions"}
        first = http.post("/v1/chat/completions", json={**body, "messages": messages}).json()
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And three more?"}]
        second = http.post("/v1/chat/completions", json={**body, "messages": messages}).json()
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["total_tokens"] - 1
        assert http.delete("/v1/sessions/chat").status_code == 200
