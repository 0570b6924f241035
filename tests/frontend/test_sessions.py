"""Sessions over HTTP: what travels, what is shown, and to whom."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from frontend_harness import RunningFrontend, chat_body

from ringserve.config import FrontendConfig
from ringserve.messages.requests import GenerateRequest
from ringserve.messages.sessions import DropSession, SessionInfo, SessionRef

KEPT = SessionInfo("talk/1", 49, 4, 3_000_000_000, 1_500_000_000, 8_500_000_000)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_they_travel(path: str) -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        more: dict[str, Any] = {"session_id": "talk/1", "user": "eve"}
        body = chat_body(**more) if path.startswith("/v1/chat") else {"prompt": "a", "max_tokens": 2, **more}
        assert http.post(path, json=body).status_code == 200
        assert http.post(path, json=body, headers={"x-ringserve-tenant": "team"}).status_code == 200
        del body["session_id"]
        assert http.post(path, json=body).status_code == 200
        sessions = [request.session for request in frontend.fake.of_kind(GenerateRequest)]
        # `user` is anybody's to choose: it owns no sessions.
        assert sessions == [SessionRef("", "talk/1"), SessionRef("team", "talk/1"), None]


@pytest.mark.parametrize("session_id", ["", "x" * 257, 7])
def test_what_is_no_id(session_id: Any) -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        answer = http.post("/v1/chat/completions", json=chat_body(session_id=session_id))
        assert answer.status_code == 400
        assert "session_id" in answer.json()["error"]["message"]


def test_list_and_drop() -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        assert http.get("/v1/sessions").json() == {"object": "list", "data": []}
        frontend.fake.sessions[SessionRef("", "talk/1")] = KEPT
        (shown,) = http.get("/v1/sessions").json()["data"]
        assert shown == {
            "id": "talk/1",
            "object": "session",
            "tokens": 49,
            "pages": 4,
            "age": 3.0,
            "idle": 1.5,
            "expires_in": 8.5,
        }
        dropped = http.delete("/v1/sessions/talk%2F1")
        assert (dropped.status_code, dropped.json()["deleted"], dropped.json()["id"]) == (200, True, "talk/1")
        again = http.delete("/v1/sessions/talk/1")
        assert again.status_code == 404
        assert again.json()["error"]["code"] == "session_not_found"
        assert http.post("/v1/sessions").status_code == 405
        assert frontend.statistics()["pending_replies"] == 0


def test_a_key_sees_only_its_own() -> None:
    with RunningFrontend(FrontendConfig(api_key=("one", "two"))) as frontend:
        frontend.fake.sessions[SessionRef("key-1", "talk/1")] = KEPT
        mine = httpx.Client(base_url=frontend.url, headers={"authorization": "Bearer one"})
        # nobody can speak for another
        other = {"authorization": "Bearer two", "x-ringserve-tenant": "key-1"}
        others = httpx.Client(base_url=frontend.url, headers=other)
        with mine, others:
            assert httpx.get(f"{frontend.url}/v1/sessions").status_code == 401
            assert httpx.delete(f"{frontend.url}/v1/sessions/talk/1").status_code == 401
            assert others.get("/v1/sessions").json()["data"] == []
            assert others.delete("/v1/sessions/talk/1").status_code == 404
            assert len(mine.get("/v1/sessions").json()["data"]) == 1
            assert mine.delete("/v1/sessions/talk/1").status_code == 200
        assert [message.session.owner for message in frontend.fake.of_kind(DropSession)] == ["key-2", "key-1"]


def test_not_before_the_model_is_there() -> None:
    with RunningFrontend(ready=False) as frontend, httpx.Client(base_url=frontend.url) as http:
        assert http.get("/v1/sessions").status_code == 503
        assert http.delete("/v1/sessions/x").status_code == 503


def test_long_owners_that_begin_alike_are_two() -> None:
    """A name that is too long (a proxy may take a token for it) is not cut: others may begin like it."""
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        for end in "ab":
            headers = {"x-ringserve-tenant": "x" * 256 + end}
            answer = http.post("/v1/chat/completions", json=chat_body(session_id="talk"), headers=headers)
            assert answer.status_code == 200
            frontend.fake.sessions[SessionRef("x" * 256, "talk/1")] = KEPT
            assert http.get("/v1/sessions", headers=headers).json()["data"] == []
        one, two = frontend.fake.of_kind(GenerateRequest)
        assert one.session is not None
        assert two.session is not None
        assert one.session.owner != two.session.owner
        assert one.tenant != two.tenant
        assert max(len(one.session.owner), len(one.tenant)) <= 256
