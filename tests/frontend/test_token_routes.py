"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from frontend_harness import MODEL, RawClient, RunningFrontend, chat_body

from ringserve.messages.requests import Abort


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "a b c"}).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [0, 1, 2], "token_strs": None}
    answer = http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["<0>", "<1>"]
    answer = http.post("/tokenize", json={"messages": chat_body()["messages"], "add_generation_prompt": False}).json()
    assert answer["count"] == 1
    assert http.post("/detokenize", json={"tokens": [4, 5]}).json() == {"prompt": "4 5"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": chat_body()["messages"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "junk": 1}, "junk"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_long_answers_are_written_in_pieces(http: httpx.Client, frontend: RunningFrontend, count: int) -> None:
    prompt = " ".join(map(str, range(count)))
    answer = http.post("/tokenize", json={"prompt": prompt})
    assert answer.headers["content-type"] == "application/json"
    ids = list(range(count)) if count else [0]
    assert answer.json() == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    answer = http.post("/detokenize", json={"tokens": [7] * count})
    assert answer.json() == {"prompt": " ".join(["7"] * count)}
    assert http.post("/detokenize", json={"tokens": [7] * count + [-1]}).status_code == 400


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_a_question_whose_client_leaves_is_taken_back(path: str, body: dict[str, Any]) -> None:
    with RunningFrontend() as frontend:
        frontend.fake.mute = True
        client = RawClient(frontend)
        client.post(path, body)
        frontend.wait_until(lambda: bool(frontend.fake.received))
        client.close()
        frontend.wait_until(lambda: bool(frontend.fake.of_kind(Abort)))
        (question, abort) = frontend.fake.received
        assert abort.request_id == question.request_id
        assert frontend.statistics()["pending_replies"] == 0
