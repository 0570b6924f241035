"""Prompts to token ids before anything is computed, so that a bad one is refused before the batch begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ringserve.messages.columns import unpack_i32
from ringserve.messages.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ringserve.messages.requests import RequestRefused
from ringserve.messages.rings import FrontendInbound, FrontendMessage
from ringserve.messages.tokenization import DetokenizeRequest, DetokenizeResult, TokenizeRequest, TokenizeResult

MAX_IN_FLIGHT = 128


@dataclass
class EncodedPrompt:
    """A prompt as ids."""

    token_ids: bytes
    """int32."""
    text: str | None
    """The given or rendered text; None for token ids."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    def ids(self) -> list[int]:
        return unpack_i32(self.token_ids).tolist()


class EncodingJob:
    """Encodes a batch of prompts in the tokenizer process; conversations also come back as text.

    Raises:
        ValueError: out of ``handle``, when a prompt is refused.
    """

    def __init__(self, prompts: Sequence[Prompt], new_id: Callable[[], int]) -> None:
        self._prompts = prompts
        self._new_id = new_id
        self._next = 0
        self._asked: dict[int, int] = {}
        """Index of the prompt that a request in flight is about."""
        self._to_decode: list[int] = []
        self._encoded: list[EncodedPrompt | None] = [None] * len(prompts)

    def encoded(self) -> list[EncodedPrompt]:
        """All prompts, once it is done."""
        return [each for each in self._encoded if each is not None]

    @property
    def done(self) -> bool:
        return self._next == len(self._prompts) and not self._asked and not self._to_decode

    def request_ids(self) -> Iterable[int]:
        return ()  # nothing that could be aborted

    def next_message(self) -> FrontendMessage | None:
        if len(self._asked) >= MAX_IN_FLIGHT:
            return None
        if self._to_decode:
            index = self._to_decode.pop()
            encoded = self._encoded[index]
            assert encoded is not None
            return DetokenizeRequest(self._ask(index), encoded.token_ids)
        while self._next < len(self._prompts):
            index, prompt = self._next, self._prompts[self._next]
            self._next += 1
            if isinstance(prompt, TokenPrompt):
                self._encoded[index] = EncodedPrompt(prompt.token_ids, None)
            else:
                return TokenizeRequest(self._ask(index), prompt)
        return None

    def handle(self, message: FrontendInbound) -> None:
        match message:
            case TokenizeResult(request_id, token_ids) if request_id in self._asked:
                index = self._asked.pop(request_id)
                prompt = self._prompts[index]
                self._encoded[index] = EncodedPrompt(token_ids, prompt.text if isinstance(prompt, TextPrompt) else None)
                if isinstance(prompt, ChatPrompt):
                    self._to_decode.append(index)
            case DetokenizeResult(request_id, text) if request_id in self._asked:
                encoded = self._encoded[self._asked.pop(request_id)]
                assert encoded is not None
                encoded.text = text
            case RequestRefused(request_id=request_id) if request_id in self._asked:
                raise ValueError(f"{_place(self._asked[request_id], len(self._prompts))}{message.message}")
            case _:
                pass  # of a job that was given up

    def _ask(self, index: int) -> int:
        request_id = self._new_id()
        self._asked[request_id] = index
        return request_id


class DecodingJob:
    """Token ids to text.

    Raises:
        ValueError: out of ``handle``, when an id is outside the vocabulary.
    """

    def __init__(self, prompt: TokenPrompt, request_id: int) -> None:
        self._message: DetokenizeRequest | None = DetokenizeRequest(request_id, prompt.token_ids)
        self._request_id = request_id
        self.text: str | None = None

    @property
    def done(self) -> bool:
        return self.text is not None

    def request_ids(self) -> Iterable[int]:
        return ()

    def next_message(self) -> FrontendMessage | None:
        message, self._message = self._message, None
        return message

    def handle(self, message: FrontendInbound) -> None:
        match message:
            case DetokenizeResult(self._request_id, text):
                self.text = text
            case RequestRefused(request_id=self._request_id):
                raise ValueError(message.message)
            case _:
                pass  # of a job that was given up


def check_lengths(prompts: Sequence[EncodedPrompt], max_model_len: int) -> None:
    """Every prompt must leave room for a token.

    Raises:
        ValueError: with the place of the first one that does not.
    """
    for index, prompt in enumerate(prompts):
        if prompt.num_tokens >= max_model_len:
            raise ValueError(
                f"{_place(index, len(prompts))}prompt is too long: it has {prompt.num_tokens} tokens, and the model's "
                f"context of {max_model_len} tokens (max_model_len) must hold at least one more."
            )


def _place(index: int, count: int) -> str:
    return f"prompts[{index}]: " if count > 1 else ""
