"""Conversations: checks that every role and part is one that the chat template will be shown as it was meant."""

from __future__ import annotations

from typing import Any

import msgspec

from ringserve.frontend.errors import invalid, shortened
from ringserve.frontend.protocol import ChatCompletionBody, TokenizeBody
from ringserve.messages.prompts import ChatPrompt

_ROLES = ("system", "developer", "user", "assistant")
_FIELDS = frozenset({"role", "content", "name"})
_ABSENT = ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning", "reasoning_content")
"""Accepted when null or empty, as in an answer that is sent back as history."""


def chat_prompt(body: ChatCompletionBody | TokenizeBody) -> ChatPrompt:
    """The conversation, normalised: text parts joined, ``developer`` as ``system`` (templates know no other name)."""
    messages = body.messages or []
    if not messages:
        raise invalid("messages must have at least one message.", "messages")
    continued = bool(body.continue_final_message)
    generation = (not continued) if body.add_generation_prompt is None else body.add_generation_prompt
    if continued and generation:
        raise invalid("continue_final_message and add_generation_prompt cannot both be true.", "continue_final_message")
    return ChatPrompt(
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        add_generation_prompt=generation,
        continue_final_message=continued,
        template_kwargs=_template_kwargs(body.chat_template_kwargs or {}),
    )


def _template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The only values of a request that have no type; what a message cannot carry (integers beyond 64 bits) is
    refused here."""
    name = "chat_template_kwargs"
    try:
        msgspec.msgpack.encode(kwargs)
    except OverflowError:
        raise invalid(f"{name} must not hold integers of more than 64 bits.", name) from None
    except RecursionError:
        raise invalid(f"{name} is nested too deeply.", name) from None
    except TypeError as error:  # offline only: JSON holds nothing of the kind
        raise invalid(f"{name}: {error}", name) from None
    return kwargs


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise invalid(f"{place}.role must be one of {', '.join(_ROLES)}.", f"{place}.role")
    if role not in _ROLES:
        served = " (tools are not supported by this server)" if role in ("tool", "function") else ""
        raise invalid(
            f"{place}.role must be one of {', '.join(_ROLES)}, got '{shortened(role)}'{served}.", f"{place}.role"
        )
    for name, value in message.items():
        if name in _FIELDS or (name in _ABSENT and not value):
            continue
        shown = shortened(name)
        raise invalid(
            f"'{place}.{shown}' is not supported by this server.", f"{place}.{shown}", "unsupported_parameter"
        )
    checked = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{place}.content"),
    }
    author = message.get("name")
    if author is not None:
        if not isinstance(author, str):
            raise invalid(f"{place}.name must be a string.", f"{place}.name")
        checked["name"] = author
    return checked


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"{place} must be a string or a list of text parts.", place)
    return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(f"{place} must be an object with a type.", place)
    if part["type"] not in ("text", "input_text", "output_text"):
        message = f"{place}: content of type '{shortened(part['type'])}' is not supported by this server."
        raise invalid(message, f"{place}.type", "unsupported_parameter")
    if not isinstance(part.get("text"), str):
        raise invalid(f"{place}.text must be a string.", f"{place}.text")
    text: str = part["text"]
    return text
