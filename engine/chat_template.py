"""Conversations to text through a model's Jinja chat template, in transformers' sandbox.

Knows nothing about token ids. The text already holds every special token, so it is encoded without adding any.
"""

from __future__ import annotations

from typing import Any, Final

from ringserve.messages.prompts import ChatPrompt

_RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "tokenize",
    }
)
"""Names in ``template_kwargs`` that would change what the request's own fields say."""
_MAX_ERROR: Final = 500
"""Characters of a template's message that are passed on: templates may quote whole conversations."""


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered: the client's mistake, or a template that does not take it."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message if len(message) <= _MAX_ERROR else message[: _MAX_ERROR - 3] + "...")
        self.param = param


class ChatRenderer:
    """Renders with one model's templates.

    Args:
        templates: Jinja sources by name; "default" is used, "tool_use" (if there is one) for prompts with tools.
        special_tokens: variables such as ``bos_token``.
    """

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, Any]) -> None:
        self._templates = templates
        self._special_tokens = special_tokens

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text, as transformers' ``apply_chat_template(tokenize=False)`` gives it.

        Messages whose content is a list of text parts get the parts joined by line feeds; keys with the value None are
        left out.

        Raises:
            ChatTemplateError: no template, a malformed conversation, or the template's own ``raise_exception``.
        """
        # Imported here: a second of transformers that only chat needs, paid while the model loads.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        reserved = sorted(_RESERVED & prompt.template_kwargs.keys())
        if reserved:
            raise ChatTemplateError(f"chat_template_kwargs must not contain {reserved[0]!r}.", "chat_template_kwargs")
        variables = dict(prompt.template_kwargs)
        tools, documents = variables.pop("tools", None), variables.pop("documents", None)
        template = self._choose(prompt, bool(tools))
        messages = [_plain_message(message, index) for index, message in enumerate(prompt.messages)]
        if not messages:
            raise ChatTemplateError("messages must not be empty.")
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt cannot both be true.", "continue_final_message"
            )
        try:
            rendered, _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                documents=documents,
                chat_template=template,
                continue_final_message=prompt.continue_final_message,
                add_generation_prompt=prompt.add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except TemplateError as error:
            raise ChatTemplateError(f"The chat template refused the conversation: {error}") from error
        except RecursionError as error:
            raise ChatTemplateError("The conversation is nested too deeply for the chat template.") from error
        except Exception as error:  # templates are programs: any of Python's errors may come out of them
            raise ChatTemplateError(f"The chat template failed on the conversation: {error}") from error
        return str(rendered[0])

    def warm_up(self) -> str | None:
        """Compile the default template, so that the first conversation need not wait; what is wrong with its syntax."""
        from jinja2 import TemplateSyntaxError

        try:
            self.render(ChatPrompt([{"role": "user", "content": "Hello"}]))
        except ChatTemplateError as error:
            # A template may well refuse this conversation; only one that cannot be compiled is broken.
            if isinstance(error.__cause__, TemplateSyntaxError):
                return f"line {error.__cause__.lineno}: {error.__cause__.message}"
        return None

    def _choose(self, prompt: ChatPrompt, has_tools: bool) -> str:
        if prompt.chat_template is not None:
            return prompt.chat_template
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        template = self._templates.get("default")
        if template is None:
            raise ChatTemplateError(
                "The model has no chat template: give one (--chat-template FILE), or complete plain text instead."
            )
        return template


def _plain_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message without None values, its content a string."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_text_of(part, index) for part in content)
    return plain


def _text_of(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ChatTemplateError(f"messages[{index}]: content of type {kind!r} is not supported, only text.")
