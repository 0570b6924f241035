"""From a choice's output to OpenAI's JSON: chat and plain completions, whole and in chunks.

A format holds what a stream has to remember between chunks (which choices began, text offsets); it knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ringserve.frontend.logprobs import chat_logprobs, completion_logprobs
from ringserve.frontend.stream import ChoiceOutput, CollectedChoice
from ringserve.messages.columns import unpack_i32
from ringserve.messages.logprobs import TokenLogprob
from ringserve.messages.text_outputs import TextFinish, TextStart


@dataclass(frozen=True)
class AnswerOptions:
    """What the client wants to see."""

    logprobs: int
    """-1: none; k: with the k most likely tokens."""
    echo: bool = False
    token_ids: bool = False


class AnswerFormat(Protocol):
    """How one endpoint family writes choices."""

    whole: str
    """``object`` of an answer."""
    chunk: str
    """``object`` of a chunk."""

    def choice(self, index: int, collected: CollectedChoice) -> dict[str, Any]:
        """An element of ``choices`` of a whole answer."""

    def chunks(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        """Elements of ``choices``, each for a frame of its own."""


class ChatFormat:
    """/v1/chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._started: set[int] = set()

    def choice(self, index: int, collected: CollectedChoice) -> dict[str, Any]:
        finish = collected.finish
        body: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(collected.texts), "refusal": None},
            "logprobs": self._logprobs(collected.logprobs),
            **_finish(finish),
        }
        if self._options.token_ids:
            body["token_ids"] = collected.token_ids
            body["prompt_token_ids"] = _prompt_ids(collected.start)
        return body

    def chunks(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if output.choice not in self._started:
            self._started.add(output.choice)
            first = self._chunk(output.choice, {"role": "assistant", "content": ""}, None, None)
            if self._options.token_ids:
                first["prompt_token_ids"] = _prompt_ids(output.start)
            chunks.append(first)
        logprobs = self._logprobs(output.logprobs) if output.logprobs else None
        if output.text or logprobs is not None or (self._options.token_ids and output.token_ids):
            chunk = self._chunk(output.choice, {"content": output.text}, logprobs, None)
            if self._options.token_ids:
                chunk["token_ids"] = output.token_ids
            chunks.append(chunk)
        if output.finish is not None:
            chunks.append(self._chunk(output.choice, {}, None, output.finish))
        return chunks

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: TextFinish | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, **_finish(finish)}

    def _logprobs(self, tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._options.logprobs) if self._options.logprobs >= 0 else None


class CompletionFormat:
    """/v1/completions."""

    whole = "text_completion"
    chunk = "text_completion"

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._started: set[int] = set()
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, collected: CollectedChoice) -> dict[str, Any]:
        echoed, echoed_logprobs = self._echo(collected.start)
        body: dict[str, Any] = {
            "index": index,
            "text": echoed + "".join(collected.texts),
            "logprobs": self._logprobs(index, (*echoed_logprobs, *collected.logprobs)),
            **_finish(collected.finish),
        }
        if self._options.token_ids:
            body["token_ids"] = collected.token_ids
            body["prompt_token_ids"] = _prompt_ids(collected.start)
        return body

    def chunks(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        first = output.choice not in self._started
        text, tokens = output.text, output.logprobs
        if first:
            self._started.add(output.choice)
            echoed, echoed_logprobs = self._echo(output.start)
            text, tokens = echoed + text, (*echoed_logprobs, *tokens)
        with_ids = self._options.token_ids and (first or bool(output.token_ids))
        if not (text or tokens or output.finish is not None or with_ids):
            return []
        chunk: dict[str, Any] = {
            "index": output.choice,
            "text": text,
            "logprobs": self._logprobs(output.choice, tokens) if tokens else None,
            **_finish(output.finish),
        }
        if self._options.token_ids:
            chunk["token_ids"] = output.token_ids
            if first:
                chunk["prompt_token_ids"] = _prompt_ids(output.start)
        return [chunk]

    def _echo(self, start: TextStart | None) -> tuple[str, tuple[TokenLogprob, ...]]:
        if not self._options.echo or start is None:
            return "", ()
        return start.prompt_text or "", start.prompt_logprobs or ()

    def _logprobs(self, index: int, tokens: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        if self._options.logprobs < 0:
            return None
        body, offset = completion_logprobs(tokens, self._options.logprobs, self._offsets.get(index, 0))
        self._offsets[index] = offset
        return body


def _finish(finish: TextFinish | None) -> dict[str, Any]:
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason, "stop_reason": finish.stop_reason}


def _prompt_ids(start: TextStart | None) -> list[int] | None:
    return None if start is None else unpack_i32(start.prompt_token_ids).tolist()
