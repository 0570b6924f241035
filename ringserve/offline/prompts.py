"""What a user may give as prompts, as the engine's messages."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from ringserve.frontend.chat import chat_prompt
from ringserve.frontend.protocol import ChatCompletionBody
from ringserve.frontend.validation import token_ids
from ringserve.messages.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ringserve.offline.sampling_params import convert, plain_text, value_errors

PromptType = str | Mapping[str, Any] | Sequence[int]
"""One prompt: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of token ids."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages with ``role`` and ``content``."""


def tokens_prompt(ids: Sequence[int], place: str, vocab_size: int) -> TokenPrompt:
    """Token ids, checked.

    Raises:
        ValueError: not integers, outside the vocabulary, or none at all.
    """
    try:
        numbers = [operator.index(each) for each in ids]
    except TypeError:
        raise ValueError(f"{place} must be a list of integers") from None
    if not numbers:
        raise ValueError(f"{place} must not be empty")
    with value_errors():
        return TokenPrompt(token_ids(numbers, vocab_size, place))


def prompt_messages(prompts: PromptType | Sequence[PromptType], vocab_size: int) -> list[Prompt]:
    """One message for each prompt.

    Raises:
        ValueError: with the place of the prompt at fault.
    """
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [_prompt(prompts, "prompt", vocab_size)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise ValueError(f"prompts must be text, token ids or a list of those, not {type(prompts).__name__}")
    return [_prompt(prompt, f"prompts[{index}]", vocab_size) for index, prompt in enumerate(prompts)]


_BYTES = (bytes, bytearray, memoryview)
"""Sequences of integers, but certainly not meant as token ids."""


def _is_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(value, Sequence) or isinstance(value, _BYTES):
        return False
    return len(value) > 0 and all(hasattr(each, "__index__") for each in value)


def _prompt(prompt: object, place: str, vocab_size: int) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(plain_text(prompt, place))
    if isinstance(prompt, Mapping):
        return _dictionary(prompt, place, vocab_size)
    if _is_token_ids(prompt):
        return tokens_prompt(prompt, place, vocab_size)
    raise ValueError(f"{place} must be text, token ids or {{'prompt_token_ids': [...]}}, not {type(prompt).__name__}")


def _dictionary(prompt: Mapping[Any, Any], place: str, vocab_size: int) -> Prompt:
    given = {name: value for name, value in prompt.items() if value is not None}
    ids, text = given.get("prompt_token_ids"), given.get("prompt")
    for name in given:
        if name not in ("prompt", "prompt_token_ids"):
            raise ValueError(f"{place}: {name!r} is not supported (only 'prompt' and 'prompt_token_ids' are)")
    if ids is not None:
        return tokens_prompt(ids, f"{place}['prompt_token_ids']", vocab_size)
    if not isinstance(text, str):
        raise ValueError(f"{place} must have 'prompt' (text) or 'prompt_token_ids' (a list of integers)")
    return TextPrompt(plain_text(text, f"{place}['prompt']"))


def chat_messages(
    messages: Conversation | Sequence[Conversation],
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[Prompt]:
    """One message for each conversation.

    Raises:
        ValueError: with the place of what is at fault.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"messages must be a list of messages or of conversations, not {type(messages).__name__}")
    if chat_template is not None:
        plain_text(chat_template, "chat_template")
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise ValueError(f"chat_template_kwargs must be a mapping, not {type(chat_template_kwargs).__name__}")
    if not messages:
        return []
    several = isinstance(messages[0], Sequence) and not isinstance(messages[0], str)
    conversations: Sequence[Any] = messages if several else [messages]
    prompts: list[Prompt] = []
    for index, conversation in enumerate(conversations):
        try:
            body = convert(
                {
                    "messages": [dict(m) if isinstance(m, Mapping) else m for m in conversation],
                    "add_generation_prompt": add_generation_prompt,
                    "continue_final_message": continue_final_message,
                    "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
                },
                ChatCompletionBody,
            )
            with value_errors():
                prompt: ChatPrompt = chat_prompt(body)
            msgspec.msgpack.encode(prompt)
        except (ValueError, TypeError) as error:  # the latter: what no message can carry
            raise ValueError(f"conversation {index}: {error}" if several else str(error)) from None
        prompts.append(msgspec.structs.replace(prompt, chat_template=chat_template))
    return prompts
