"""Questions to the tokenizer process itself: ids of a prompt, text of ids."""

from __future__ import annotations

from ringserve.messages.prompts import Prompt
from ringserve.messages.structs import Message


class TokenizeRequest(Message, frozen=True):
    """Answered by TokenizeResult or RequestRefused."""

    request_id: int
    prompt: Prompt
    with_strings: bool = False


class TokenizeResult(Message, frozen=True):
    """Answer to TokenizeRequest."""

    request_id: int
    token_ids: bytes
    token_strings: tuple[str, ...] | None


class DetokenizeRequest(Message, frozen=True):
    """Answered by DetokenizeResult or RequestRefused."""

    request_id: int
    token_ids: bytes


class DetokenizeResult(Message, frozen=True):
    """Answer to DetokenizeRequest."""

    request_id: int
    text: str
