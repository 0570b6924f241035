"""Deadlines and targets on their way to the scheduler, and what a refusal for want of time looks like."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from frontend_harness import MODEL, RawClient, RunningFrontend, chat_body

from ringserve.config import FrontendConfig
from ringserve.frontend.protocol import CompletionBody
from ringserve.frontend.targets import service_targets
from ringserve.messages.requests import NO_TARGETS, GenerateRequest, RequestRefused, ServiceTargets

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def targets(**fields: Any) -> ServiceTargets:
    return service_targets(CompletionBody(prompt="a", **fields), received_ns=10**9)


def test_times_become_points_in_time() -> None:
    assert targets() is NO_TARGETS
    assert targets(deadline_ms=1500) == ServiceTargets(due_ns=2_500_000_000)
    assert targets(target_ttft_ms=0.5) == ServiceTargets(first_token_due_ns=1_000_500_000)
    assert targets(target_tpot_ms=20) == ServiceTargets(time_per_token_ns=20_000_000)


def test_an_absolute_deadline_is_as_far_off_as_it_says() -> None:
    """Whenever the head came: the body may have taken long."""
    now_ns = time.monotonic_ns()
    for received_ns in (now_ns, now_ns - 30 * 10**9):
        body = CompletionBody(prompt="a", deadline_at=time.time() + 60)
        assert service_targets(body, received_ns).due_ns == pytest.approx(now_ns + 60 * 10**9, abs=5 * 10**9)
    assert 0 < targets(deadline_at=time.time() - 3600).due_ns < now_ns  # gone by: refused, not forgotten


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_they_travel(path: str) -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        more = {"deadline_ms": 5000, "target_ttft_ms": 1000, "target_tpot_ms": 50}
        body = chat_body(**more) if path == CHAT else {"prompt": "a", "max_tokens": 2, **more}
        assert http.post(path, json=body).status_code == 200
        (request,) = frontend.fake.of_kind(GenerateRequest)
        assert request.targets == ServiceTargets(
            request.received_ns + 5_000_000_000, request.received_ns + 1_000_000_000, 50_000_000
        )


def test_a_refusal_says_when_to_come_again() -> None:
    with RunningFrontend() as frontend:
        frontend.fake.hold = True
        client = RawClient(frontend)
        client.post(CHAT, chat_body(stream=True, deadline_ms=100))
        frontend.wait_until(lambda: len(frontend.fake.running) == 1)
        request_id = frontend.fake.of_kind(GenerateRequest)[0].request_id
        refused = RequestRefused(
            request_id,
            429,
            "The end of the answer is predicted in 7.2 s, but due in 100 ms.",
            type="rate_limit_error",
            code="deadline_unreachable",
            retry_after=2.34,
            predicted_wait=2.34,
        )
        frontend.call(lambda: frontend.deliver([refused]))
        head = client.read_until(b"}}").decode().lower()
        client.close()
        assert head.startswith("http/1.1 429")
        for line in ("retry-after: 3", "retry-after-ms: 2340", "x-ringserve-predicted-wait-ms: 2340"):
            assert f"\r\n{line}\r\n" in head
        assert '"code":"deadline_unreachable"' in head
        metrics = httpx.get(frontend.url + "/metrics").text
        labels = f'engine="0",model_name="{MODEL}",reason="deadline_unreachable"'
        assert f"vllm:admission_rejections_total{{{labels}}} 1.0" in metrics


def test_a_full_queue_can_be_429() -> None:
    config = FrontendConfig(max_num_queued_reqs=0)
    with RunningFrontend(config, max_num_seqs=2, overload_status=429) as frontend:
        frontend.fake.hold = True
        first = RawClient(frontend)
        first.post(CHAT, chat_body(n=2))
        frontend.wait_until(lambda: len(frontend.fake.running) == 2)
        answer = httpx.post(frontend.url + CHAT, json=chat_body())
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert 0 < int(answer.headers["retry-after-ms"]) <= 1000 * int(answer.headers["retry-after"])
        assert int(answer.headers["x-ringserve-predicted-wait-ms"]) >= 0
        first.close()
