"""Chat templates: what is rendered, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_world import CHAT_TEMPLATE

from ringserve.engine.chat_template import ChatRenderer, ChatTemplateError
from ringserve.messages.prompts import ChatPrompt

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def renderer(template: str = CHAT_TEMPLATE, **others: str) -> ChatRenderer:
    return ChatRenderer({"default": template, **others}, SPECIAL)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_special_tokens_and_generation_prompt() -> None:
    assert renderer().render(ChatPrompt(user("Hi"))) == "<s>[user] Hi</s>\n[assistant] "
    assert renderer().render(ChatPrompt(user("Hi"), add_generation_prompt=False)) == "<s>[user] Hi</s>\n"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "[user] a\nb</s>" in renderer().render(ChatPrompt(user(parts)))


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 5, None])
def test_other_parts_are_refused(part: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]"):
        renderer().render(ChatPrompt(user([part])))


def test_continue_final_message() -> None:
    messages = [*user("Count"), {"role": "assistant", "content": "one, two"}]
    prompt = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert renderer().render(prompt) == "<s>[user] Count</s>\n[assistant] one, two"
    with pytest.raises(ChatTemplateError, match="cannot both be true"):
        renderer().render(ChatPrompt(messages, continue_final_message=True))


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(ChatTemplateError, match="Only user, system and assistant roles are supported!"):
        renderer().render(ChatPrompt([{"role": "function", "content": "x"}]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].content }}",
        "{{ messages.nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% if",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ messages[0].content + 5 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_does_is_an_error_of_ours(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        renderer(template).render(ChatPrompt(user("Hi")))


def test_long_errors_are_cut() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        renderer("{{ raise_exception('x' * 5000) }}").render(ChatPrompt(user("Hi")))
    assert len(str(caught.value)) <= 500


def test_no_template_names_the_option() -> None:
    with pytest.raises(ChatTemplateError, match="--chat-template"):
        ChatRenderer({}, SPECIAL).render(ChatPrompt(user("Hi")))


def test_a_requests_own_template_and_variables() -> None:
    prompt = ChatPrompt(user("Hi"), chat_template="{{ greeting }} {{ bos_token }}", template_kwargs={"greeting": "Yo"})
    assert renderer().render(prompt) == "Yo <s>"


def test_tool_use_template_is_taken_for_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    both = renderer("plain", tool_use="tools {{ tools[0].function.name }}")
    assert both.render(ChatPrompt(user("Hi"), template_kwargs={"tools": [tool]})) == "tools f"
    assert both.render(ChatPrompt(user("Hi"))) == "plain"


@pytest.mark.parametrize("name", ["messages", "conversations", "chat_template", "add_generation_prompt"])
def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=name) as caught:
        renderer().render(ChatPrompt(user("Hi"), template_kwargs={name: "x"}))
    assert caught.value.param == "chat_template_kwargs"


def test_none_values_and_missing_content() -> None:
    template = "{% for m in messages %}{{ 'tool_calls' in m }} {{ 'content' in m }}{% endfor %}"
    assert (
        renderer(template).render(ChatPrompt([{"role": "user", "content": None, "tool_calls": None}])) == "False False"
    )
    with pytest.raises(ChatTemplateError, match="empty"):
        renderer().render(ChatPrompt([]))


def test_strftime_now() -> None:
    assert renderer("{{ strftime_now('%Y') }}").render(ChatPrompt(user("Hi"))).isdigit()


def test_warm_up_finds_bad_syntax_only() -> None:
    assert renderer("{% if").warm_up() is not None
    assert renderer("{{ raise_exception('no') }}").warm_up() is None
    assert renderer().warm_up() is None
    assert ChatRenderer({}, SPECIAL).warm_up() is None
