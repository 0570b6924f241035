"""Loading, ready, overloaded, draining, stopped; keys, limits and ids."""

from __future__ import annotations

import contextlib
import socket
from asyncio import CancelledError
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_tokenizer_process import READY
from frontend_harness import MODEL, RawClient, RunningFrontend, chat_body

from ringserve.config import FrontendConfig
from ringserve.frontend import http_server
from ringserve.messages.requests import Abort, GenerateRequest
from ringserve.messages.startup import LoadProgress, StartFailed
from ringserve.messages.tokenization import TokenizeRequest

CHAT = "/v1/chat/completions"
POSTS = (CHAT, "/v1/completions", "/tokenize", "/detokenize")


def test_while_the_model_loads() -> None:
    with RunningFrontend(ready=False) as frontend, httpx.Client(base_url=frontend.url) as http:
        frontend.call(lambda: frontend.deliver([LoadProgress("reading weights", 0.25)]))
        health = http.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "loading", "stage": "reading weights", "progress": 0.25}
        answers = [http.post(path, json={}) for path in POSTS] + [http.get("/v1/models"), http.get("/ready")]
        for answer in answers:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == ("server_error", "loading")
        assert http.get("/version").json() == {"version": "9.9.9"}
        assert "vllm:num_requests_running" in http.get("/metrics").text
        assert frontend.fake.received == []
        frontend.call(lambda: frontend.deliver([READY]))
        assert http.get("/ready").status_code == 200
        assert http.get("/health").json() == {"status": "ok"}
        assert http.post(CHAT, json=chat_body()).status_code == 200


def test_models(http: httpx.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", READY.max_model_len)
    assert http.get(f"/v1/models/{MODEL}").json() == card


def test_overload_is_503_with_retry_after() -> None:
    config = FrontendConfig(max_num_queued_reqs=2)
    with RunningFrontend(config, max_num_seqs=2) as frontend, httpx.Client(base_url=frontend.url) as http:
        fake = frontend.fake
        fake.hold = True
        first = RawClient(frontend)
        first.post(CHAT, chat_body(n=3))
        frontend.wait_until(lambda: len(fake.running) == 3)
        answer = http.post(CHAT, json=chat_body(n=2))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
        assert http.get("/ready").status_code == 200
        too_many = http.post(CHAT, json=chat_body(n=5)).json()["error"]
        assert too_many["param"] == "n"  # would never be accepted: not worth a retry
        metrics = http.get("/metrics").text
        labels = f'engine="0",model_name="{MODEL}",reason="max_num_queued_reqs"'
        assert f"vllm:admission_rejections_total{{{labels}}} 1.0" in metrics
        assert len(fake.of_kind(GenerateRequest)) == 1
        fake.hold = False
        frontend.call(fake._schedule)
        first.read_until(b'"usage"')
        first.close()
        assert http.post(CHAT, json=chat_body(n=2)).status_code == 200


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    with RunningFrontend() as frontend:
        fake = frontend.fake
        fake.hold = True
        running = RawClient(frontend)
        running.post(CHAT, chat_body(stream=True, max_tokens=2))
        frontend.wait_until(lambda: len(fake.running) == 1)
        frontend.call(frontend.actor.request_stop)
        with httpx.Client(base_url=frontend.url) as http:
            for answer in (http.get("/ready"), http.post(CHAT, json=chat_body()), http.get("/v1/models")):
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "shutting_down"
            assert http.get("/health").json() == {"status": "draining"}
        fake.hold = False
        frontend.call(fake._schedule)
        running.read_until(b"data: [DONE]\n\n")
        frontend.join()
        assert fake.of_kind(Abort) == []
        running.close()
        host, port = frontend.url.removeprefix("http://").split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))


def test_what_outlasts_the_shutdown_timeout_gets_an_error() -> None:
    with RunningFrontend(FrontendConfig(shutdown_timeout=0.05)) as frontend:
        fake = frontend.fake
        fake.hold = True
        streamed, whole, asked = RawClient(frontend), RawClient(frontend), RawClient(frontend)
        streamed.post(CHAT, chat_body(stream=True))
        frontend.wait_until(lambda: len(fake.running) == 1)
        frontend.call(fake.step)
        streamed.read_until(b" alpha")
        whole.post(CHAT, chat_body())
        frontend.wait_until(lambda: len(fake.running) == 2)
        frontend.call(lambda: setattr(fake, "mute", True))
        asked.post("/tokenize", {"prompt": "a"})
        frontend.wait_until(lambda: bool(fake.of_kind(TokenizeRequest)))
        frontend.call(frontend.actor.request_stop)
        assert b'"code":"shutting_down"' in streamed.read_until(b"data: [DONE]\n\n")
        assert whole.read_until(b"}}").startswith(b"HTTP/1.1 503 ")
        assert asked.read_until(b"}}").startswith(b"HTTP/1.1 503 ")
        frontend.join()
        assert len(fake.of_kind(Abort)) == 2
        for client in (streamed, whole, asked):
            client.close()


def test_when_a_neighbour_dies_clients_are_told() -> None:
    """The skeleton cancels ``run``."""
    with RunningFrontend() as frontend:
        frontend.fake.hold = True
        streamed, whole = RawClient(frontend), RawClient(frontend)
        streamed.post(CHAT, chat_body(stream=True))
        frontend.wait_until(lambda: len(frontend.fake.running) == 1)
        frontend.call(frontend.fake.step)
        streamed.read_until(b" alpha")
        whole.post(CHAT, chat_body())
        frontend.wait_until(lambda: len(frontend.fake.running) == 2)
        frontend.call(frontend.life.cancel)
        assert b'"code":"engine_died"' in streamed.read_until(b"data: [DONE]\n\n")
        assert whole.read_until(b"}}").startswith(b"HTTP/1.1 503 ")
        with pytest.raises(CancelledError):
            frontend.join()
        streamed.close()
        whole.close()


def test_a_fault_of_ours_is_a_500_with_a_body(caplog: pytest.LogCaptureFixture) -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        frontend.actor.dispatcher.check_integrity = None  # type: ignore[method-assign,assignment]  # a planted fault
        answer = http.get("/debug/integrity")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "NoneType" not in answer.text
        frontend.wait_until(lambda: frontend.actor._app.active == 0)
        assert "TypeError" in caplog.text
        assert http.get("/health").status_code == 200


def test_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ringserve.access")
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        http.post(CHAT, json=chat_body(request_id="r-1"))
        frontend.fake.hold = True
        leaver = RawClient(frontend)
        leaver.post("/v1/completions", {"prompt": "a", "request_id": "r-2"})
        frontend.wait_until(lambda: bool(frontend.fake.running))
        leaver.close()
        frontend.wait_until(lambda: frontend.actor._app.active == 0)
    first, second = [record.getMessage() for record in caplog.records if record.name == "ringserve.access"]
    assert first.startswith('127.0.0.1 "POST /v1/chat/completions" 200 tokens=1+3 ')
    assert first.endswith(" ms id=r-1")
    assert second.startswith('127.0.0.1 "POST /v1/completions" 499 ')


def test_an_idle_client_does_not_delay_the_end() -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        assert http.get("/health").status_code == 200
        frontend.call(frontend.actor.request_stop)
        frontend.join()


def test_a_taken_port_is_one_line_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        frontend = RunningFrontend(FrontendConfig(port=port), keep_port=True)
        with pytest.raises(SystemExit) as exit_, frontend:
            frontend.join()
        assert exit_.value.code == 1
    (failed,) = frontend.reports
    assert isinstance(failed, StartFailed)
    assert f"port {port} on 127.0.0.1 is already in use; choose another with --port" in failed.message


def test_api_keys() -> None:
    with (
        RunningFrontend(FrontendConfig(api_key=("one", "zwei-ü"))) as frontend,
        httpx.Client(base_url=frontend.url) as http,
    ):
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/debug/integrity", "/nowhere"):
            for headers in (
                {},
                {"authorization": "Bearer two"},
                {"authorization": "one"},
                {"authorization": "Basic one"},
            ):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert http.post(CHAT, json=chat_body()).status_code == 401
        assert frontend.fake.received == []
        for key in ("one", "zwei-ü"):
            bearer = httpx.Headers([(b"authorization", f"Bearer {key}".encode())])
            assert http.get("/v1/models", headers=bearer).status_code == 200
        # With several keys the key says whose request it is, whatever else is said.
        bearer["x-ringserve-tenant"] = "somebody else"
        assert http.post(CHAT, json=chat_body(user="eve"), headers=bearer).status_code == 200
        assert frontend.fake.of_kind(GenerateRequest)[-1].tenant == "key-2"


def test_tenants_without_several_keys() -> None:
    with (
        RunningFrontend(FrontendConfig(api_key=("one",))) as frontend,
        httpx.Client(base_url=frontend.url, headers={"authorization": "Bearer one"}) as http,
    ):
        for more, headers, tenant in (
            ({}, {}, ""),
            ({"user": "eve"}, {}, "eve"),
            ({"user": "eve"}, {"x-ringserve-tenant": "team"}, "team"),
        ):
            assert http.post(CHAT, json=chat_body(**more), headers=headers).status_code == 200
            assert frontend.fake.of_kind(GenerateRequest)[-1].tenant == tenant


def test_body_limit() -> None:
    with RunningFrontend(FrontendConfig(max_body_size=2048)) as frontend, httpx.Client(base_url=frontend.url) as http:
        assert http.post(CHAT, json=chat_body(user="x" * 1000)).status_code == 200
        for content in (b"x" * 3000, iter([b"x" * 1500, b"x" * 1500])):  # with a length, and without one
            answer = http.post(CHAT, content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
        liar = RawClient(frontend)
        liar.socket.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert liar.read_until(b"}}").startswith(b"HTTP/1.1 413 ")  # before anything was sent
        liar.close()


def test_ten_megabytes_are_parsed_and_handed_on(http: httpx.Client, frontend: RunningFrontend) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a" * 10_000_000, "max_tokens": 1})
    assert answer.status_code == 200
    assert len(frontend.fake.of_kind(GenerateRequest)[-1].prompt.text) == 10_000_000


def test_request_ids(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=chat_body(), headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "chatcmpl-abc-1"
    answer = http.post("/v1/completions", json={"prompt": "a", "request_id": "mine"}, headers={"x-request-id": "abc-2"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["id"] == "cmpl-mine"
    replaced = http.get("/health", headers={"x-request-id": "a" * 200}).headers["x-request-id"]
    assert len(replaced) == 32
    assert http.get("/nowhere").headers["x-request-id"] != http.get("/nowhere").headers["x-request-id"]


def test_headers(http: httpx.Client) -> None:
    headers = http.get("/health").headers
    assert headers["date"].endswith("GMT")
    assert "server" not in headers


def test_broken_http_is_400_in_json(frontend: RunningFrontend) -> None:
    client = RawClient(frontend)
    client.socket.sendall(b"nonsense\r\n\r\n")
    data = client.read_until(b"}}")
    assert data.startswith(b"HTTP/1.1 400 ")
    assert b'"type":"invalid_request_error"' in data
    client.close()


@pytest.mark.parametrize("start", [b"GET /", b"GET /health HTTP/1.1\r\nx: ", b"GET /health HTTP/1.1\r\n\r\nGET /"])
def test_an_endless_head_is_431(frontend: RunningFrontend, start: bytes) -> None:
    client = RawClient(frontend)
    with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
        client.socket.sendall(start)
        for _ in range(100):
            client.socket.sendall(b"a" * 65536)
    frontend.wait_until(lambda: frontend.actor._app.active == 0)
    with contextlib.suppress(ConnectionError):
        data = client.read_until(b"larger than 65536 bytes")
        assert b"HTTP/1.1 431 " in data
    client.close()


def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_SECONDS", 0.1)
    with RunningFrontend() as frontend:
        for start in (b"", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n\r\nGET"):
            client = RawClient(frontend)
            client.socket.sendall(start)
            while client.socket.recv(4096):
                pass
            client.close()
        client = RawClient(frontend)
        client.socket.sendall(b"GET /health HTTP/1.1\r\n\r\n")  # a complete one is kept alive
        client.read_until(b"ok")
        client.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.socket.recv(1)
        client.close()


def test_many_at_once(frontend: RunningFrontend) -> None:
    with httpx.Client(base_url=frontend.url, timeout=30, limits=httpx.Limits(max_connections=40)) as http:

        def ask(index: int) -> bool:
            answer = http.post(CHAT, json=chat_body(max_tokens=1 + index % 7, stream=bool(index % 2)))
            return answer.status_code == 200 and (index % 2 == 0 or answer.text.endswith("data: [DONE]\n\n"))

        with ThreadPoolExecutor(20) as pool:
            assert all(pool.map(ask, range(100)))
    frontend.wait_until(lambda: not any(frontend.actor.dispatcher.statistics().values()))
