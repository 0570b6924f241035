"""Messages that find no room on their way, or cannot be sent at all: an answer, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from frontend_harness import RunningFrontend, chat_body

from ringserve.messages.requests import Abort, GenerateRequest
from ringserve.shm import ChannelOverflow, MessageTooLarge, ShmError

CHAT = "/v1/chat/completions"
POSTS = (CHAT, "/v1/completions", "/tokenize", "/detokenize")


def test_what_cannot_be_sent_leaves_no_entry(caplog: pytest.LogCaptureFixture) -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:

        def send(message: object) -> None:
            raise OverflowError

        frontend.fake.send = send  # type: ignore[method-assign]  # a planted fault
        assert http.post("/v1/chat/completions", json=chat_body()).status_code == 500
        statistics = frontend.statistics()
        assert (statistics["journal_entries"], statistics["choices_in_flight"]) == (0, 0)
        assert "OverflowError" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "code"), [(MessageTooLarge, 413, "request_too_large"), (ChannelOverflow, 503, "overloaded")]
)
def test_what_no_message_can_carry_is_an_answer(error: type[ShmError], status: int, code: str) -> None:
    """Bodies may be larger than what goes from process to process, and many large ones may come at once."""
    bodies = (chat_body(), {"prompt": "a"}, {"prompt": "a"}, {"tokens": [1]})
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:

        def send(message: object) -> None:
            raise error

        frontend.fake.send = send  # type: ignore[method-assign]  # a planted fault
        for path, body in zip(POSTS, bodies, strict=True):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert ("retry-after" in answer.headers) == (status == 503)
        assert not any(frontend.statistics().values())


@pytest.mark.parametrize("error", [MessageTooLarge, ChannelOverflow, OverflowError])
@pytest.mark.parametrize("sent", [0, 1, 4])
def test_a_prompt_that_cannot_be_sent_takes_those_before_it_along(error: type[Exception], sent: int) -> None:
    """Nobody waits for the answers of a request that was refused."""
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        fake, count = frontend.fake, 0
        fake.hold, original = True, fake.send

        def send(message: Any) -> None:
            nonlocal count
            if isinstance(message, GenerateRequest):
                if count == sent:
                    raise error
                count += 1
            original(message)

        fake.send = send  # type: ignore[method-assign]  # a planted fault
        answer = http.post("/v1/completions", json={"prompt": ["a"] * 5, "max_tokens": 400, "n": 2})
        assert answer.status_code == {MessageTooLarge: 413, ChannelOverflow: 503, OverflowError: 500}[error]
        frontend.wait_until(lambda: not any(frontend.actor.dispatcher.statistics().values()))
        assert len(fake.of_kind(Abort)) == sent


def test_an_abort_that_finds_no_room_is_sent_again() -> None:
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        fake, refused = frontend.fake, 0
        fake.hold, original = True, fake.send

        def send(message: Any) -> None:
            nonlocal refused
            if isinstance(message, Abort) and refused < 2:
                refused += 1
                raise ChannelOverflow
            original(message)

        fake.send = send  # type: ignore[method-assign]  # a planted fault
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=chat_body(), timeout=0.3)  # the client leaves
        frontend.wait_until(lambda: len(fake.of_kind(Abort)) == 1)
        frontend.wait_until(lambda: not any(frontend.actor.dispatcher.statistics().values()))
        assert refused == 2
