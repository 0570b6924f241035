"""Request bodies of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ringserve.bench.prompts import Job

Api = Literal["completions", "chat"]


@dataclass(frozen=True)
class BodyBuilder:
    """Turns of jobs as JSON bodies of one API."""

    api: Api
    model: str
    ask_usage: bool = True
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters and everything else that goes into each body as it is."""

    @property
    def route(self) -> str:
        """Below the base URL."""
        return "/chat/completions" if self.api == "chat" else "/completions"

    def body(self, job: Job, turn: int, answers: Sequence[str] = ()) -> bytes:
        """The request of one turn, after the answers to the turns before it.

        Raises:
            TypeError: token ids where only text can go: chat, or a turn after an answer.
        """
        asked = job.turns[turn]
        content: dict[str, Any] = {"model": self.model, "max_tokens": asked.output_tokens, "stream": True}
        if self.ask_usage:
            content["stream_options"] = {"include_usage": True}
        content.update(self.parameters)
        if self.api == "completions" and turn == 0:
            content["prompt"] = asked.prompt
            return msgspec.json.encode(content)
        questions = [each.prompt for each in job.turns[: turn + 1]]
        texts = [question for question in questions if isinstance(question, str)]
        if len(texts) < len(questions):
            raise TypeError("token ids cannot be sent as chat messages or after an answer")
        if self.api == "completions":
            said = "".join(f"{text}\n{answer}\n" for text, answer in zip(texts, answers, strict=False))
            content["prompt"] = said + texts[-1]
        else:
            content["messages"] = [{"role": "user", "content": texts[0]}]
            for answer, text in zip(answers, texts[1:], strict=True):
                content["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
        return msgspec.json.encode(content)
