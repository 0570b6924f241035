"""``ringserve chat``: a conversation in the terminal, with the figures that matter after each answer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class ChatOptions:
    """What ``ringserve chat`` takes."""

    url: str
    model: str | None
    api_key: str | None
    system_prompt: str | None
    max_tokens: int | None
    temperature: float | None
    quick: str | None


class ChatError(Exception):
    """The server cannot be talked to, or refused; the message is for the user."""


@dataclass
class Answer:
    """One streamed answer and its times (``time.perf_counter()`` seconds)."""

    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    text: str = ""
    num_tokens: int | None = None
    finish_reason: str | None = None

    def add(self, piece: str) -> None:
        """A piece of text has arrived."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        self.text += piece

    def figures(self) -> str:
        """TTFT, tokens and tokens/s in one line; the rate is of the tokens after the first."""
        if self.first is None or self.last is None:
            return "no text"
        parts = [f"TTFT {(self.first - self.asked) * 1e3:.0f} ms"]
        if self.num_tokens is not None:
            parts.append(f"{self.num_tokens} tokens")
            if self.num_tokens > 1 and self.last > self.first:
                parts.append(f"{(self.num_tokens - 1) / (self.last - self.first):.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        return " | ".join(parts)


def chat(options: ChatOptions) -> int:
    """Run the conversation; returns the exit status."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        _check(options)
        with httpx.Client(
            base_url=options.url.rstrip("/"), headers=headers, timeout=httpx.Timeout(10, read=600)
        ) as client:
            model = options.model or _first_model(client)
            conversation: list[dict[str, str]] = []
            if options.system_prompt:
                conversation.append({"role": "system", "content": typed(options.system_prompt)})
            if options.quick is not None:
                _turn(client, model, conversation, options.quick, options)
                return 0
            import readline  # noqa: F401  importing it gives input() line editing and history

            print(f"Talking to {model}. Ctrl-D or /quit leaves, /new starts afresh.", file=sys.stderr)
            _converse(client, model, conversation, options)
            return 0
    except ChatError as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def typed(text: str) -> str:
    """What came from the terminal as text: bytes that are no UTF-8 come as lone surrogates, which JSON cannot hold."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _check(options: ChatOptions) -> None:
    """What the HTTP client would only complain about with a traceback."""
    if options.api_key and not options.api_key.isascii():
        raise ChatError("--api-key: a key must be ASCII text")
    try:
        scheme = httpx.URL(options.url).scheme
    except httpx.InvalidURL as error:
        raise ChatError(f"--url {options.url}: {error}") from error
    if scheme not in ("http", "https"):
        raise ChatError(f"--url {options.url}: an address such as http://127.0.0.1:8000/v1 is wanted")


def _converse(client: httpx.Client, model: str, conversation: list[dict[str, str]], options: ChatOptions) -> None:
    opening = len(conversation)
    while True:
        try:
            text = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        if text.strip() in ("/quit", "/exit"):
            return
        if text.strip() == "/new":
            del conversation[opening:]
        elif text.strip():
            try:
                _turn(client, model, conversation, text, options)
            except ChatError as error:  # the conversation goes on without the failed turn
                print(f"\nringserve: error: {error}", file=sys.stderr)
            except KeyboardInterrupt:  # so it does without an answer that was cut short
                print("\n[stopped; Ctrl-C once more at the prompt leaves]", file=sys.stderr)


def _turn(
    client: httpx.Client, model: str, conversation: list[dict[str, str]], text: str, options: ChatOptions
) -> None:
    question = {"role": "user", "content": typed(text)}
    body: dict[str, Any] = {
        "model": model,
        "messages": [*conversation, question],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    answer = Answer()
    try:
        for chunk in _stream(client, body):
            if chunk.get("usage"):
                answer.num_tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk.get("choices", ()):
                if piece := choice["delta"].get("content"):
                    answer.add(piece)
                    print(piece, end="", flush=True)
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    except httpx.HTTPError as error:
        raise ChatError(f"the connection broke: {error or type(error).__name__}") from error
    print(flush=True)
    print(f"[{answer.figures()}]", file=sys.stderr)
    conversation += [question, {"role": "assistant", "content": answer.text}]


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", "/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise ChatError(_message(response))
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise ChatError(str(chunk["error"].get("message", chunk["error"])))
            yield chunk


def _first_model(client: httpx.Client) -> str:
    try:
        response = client.get("/models")
    except httpx.HTTPError as error:
        raise ChatError(
            f"nothing answers at {client.base_url} ({error or type(error).__name__}): "
            "start a server with `ringserve serve`, or give its address with --url"
        ) from error
    if response.status_code == 404:
        raise ChatError(f"no models at {client.base_url}: the address of an OpenAI-compatible API usually ends in /v1")
    if response.status_code != 200:
        raise ChatError(_message(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ChatError(
            f"{client.base_url} does not look like an OpenAI-compatible API (its path usually ends in /v1)"
        ) from None


def _message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
