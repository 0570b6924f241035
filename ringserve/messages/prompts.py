"""What a request begins with, as the frontend hands it to the tokenizer process."""

from __future__ import annotations

from typing import Any

import msgspec

from ringserve.messages.structs import Message


class ChatPrompt(Message, frozen=True):
    """A conversation that the tokenizer process renders with the model's chat template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class TextPrompt(Message, frozen=True):
    """A text; special tokens (BOS) are added as the tokenizer's own post-processor says, unless switched off."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(Message, frozen=True):
    """int32 token ids, taken as they are."""

    token_ids: bytes


Prompt = ChatPrompt | TextPrompt | TokenPrompt
