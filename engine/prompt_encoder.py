"""Prompts to token ids, with every reason to refuse one. Pure: runs in a worker thread or inline.

Knows no request ids, no neighbours and no threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.engine.chat_template import ChatRenderer, ChatTemplateError
from ringserve.engine.token_text import TokenText
from ringserve.engine.tokenizer_loader import LoadedTokenizer
from ringserve.messages.columns import unpack_i32
from ringserve.messages.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ringserve.messages.requests import RequestRefused

PIECE = 65_536
"""Token ids that are looked at in one go, about 1 ms: a call on millions would keep all other threads from the
interpreter for as long as it takes."""


class PromptError(ValueError):
    """The prompt is refused with status 400."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def refusal(self, request_id: int) -> RequestRefused:
        """The message for the client."""
        return RequestRefused(request_id, 400, str(self), param=self.param, code=self.code)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What the model takes (``ExecutorReady``)."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as ids."""

    token_ids: bytes
    """int32."""
    text: str | None
    """The given or rendered text; for token ids the decoded text if it was asked for."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


class PromptEncoder:
    """Encodes for one tokenizer. Thread-safe: holds no state beyond the tokenizer."""

    def __init__(self, loaded: LoadedTokenizer, tokens: TokenText) -> None:
        self._backend = loaded.backend
        self._renderer = ChatRenderer(loaded.chat_templates, loaded.special_tokens)
        self.template_problem = self._renderer.warm_up()
        """What is wrong with the syntax of the chat template."""
        self._longest_token = max(1, tokens.longest_token())

    def encode(
        self,
        prompt: Prompt,
        limits: PromptLimits | None,
        *,
        room: int = 0,
        decode: bool = False,
        skip_special_tokens: bool = True,
    ) -> EncodedPrompt:
        """Encode a prompt.

        Args:
            limits: None encodes without asking whether it fits.
            room: new tokens there must be room for beyond the prompt.
            decode: also give the text of token ids.

        Raises:
            PromptError: empty, malformed, outside the vocabulary or too long. Texts are refused before they are
                encoded where they have more characters than ``max_model_len`` of the longest tokens stand for.
        """
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        text = None
        if isinstance(prompt, TokenPrompt):
            packed = prompt.token_ids
        else:
            text = self._text_of(prompt)
            if limits is not None:
                self._check_characters(text, limits, param)
            ids = self._encode_text(text, isinstance(prompt, TextPrompt) and prompt.add_special_tokens)
            self._check_range(ids, limits, param)
            packed = _packed(ids)
        view = unpack_i32(packed)
        count = len(view)
        if count == 0:
            raise PromptError(f"{param} must not be empty.", param)
        if limits is not None:
            self._check_count(count, limits, room, param)
        if isinstance(prompt, TokenPrompt):
            self._check_range(view, limits, param)
        if decode and text is None:
            text = self.decode(view.tolist(), skip_special_tokens)
        return EncodedPrompt(packed, text)

    def checked_ids(self, packed: bytes, limits: PromptLimits | None, param: str) -> list[int]:
        """Unpacked token ids, all of them inside the vocabulary.

        Raises:
            PromptError: one is not.
        """
        view = unpack_i32(packed)
        ids: list[int] = []
        for start in range(0, len(view), PIECE):
            ids += view[start : start + PIECE].tolist()
        self._check_range(ids, limits, param)
        return ids

    def bad_word_ids(self, words: Sequence[str], limits: PromptLimits) -> list[list[int]]:
        """The sequences of tokens that stand for words: each word at the beginning of a text and, where that is another
        sequence, after a space. vLLM takes the second only where it has as many tokens; but a word that is one token
        after a space is often two or three without, and would be generated.

        Raises:
            PromptError: a word has no token, or one that the model has not.
        """
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        sequences: list[list[int]] = []
        for word, plain, spaced in zip(words, encoded[::2], encoded[1::2], strict=True):
            if not plain.ids:
                raise PromptError(f"bad_words: no token stands for {word[:100]!r}.", "bad_words")
            self._check_range([*plain.ids, *spaced.ids], limits, "bad_words")
            sequences.append(plain.ids)
            if spaced.ids != plain.ids:
                sequences.append(spaced.ids)
        return sequences

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids. ``decode_batch`` releases the GIL."""
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def _text_of(self, prompt: ChatPrompt | TextPrompt) -> str:
        if isinstance(prompt, TextPrompt):
            text = prompt.text
        else:
            try:
                text = self._renderer.render(prompt)
            except ChatTemplateError as error:
                raise PromptError(str(error), error.param) from error
        try:
            text.encode()
        except UnicodeEncodeError:
            # Lone surrogates are no text; pairs that were escaped one by one are.
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike encode(), it lets other Python threads run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _check_range(self, ids: Sequence[int], limits: PromptLimits | None, param: str) -> None:
        vocab_size = limits.vocab_size if limits is not None else self._backend.get_vocab_size(with_added_tokens=True)
        for start in range(0, len(ids), PIECE):
            piece = ids[start : start + PIECE]
            if min(piece) < 0 or max(piece) >= vocab_size:
                bad = next(token_id for token_id in piece if not 0 <= token_id < vocab_size)
                raise PromptError(f"Token id {bad} is out of vocabulary (0 to {vocab_size - 1}).", param)

    def _check_characters(self, text: str, limits: PromptLimits, param: str) -> None:
        bound = limits.max_model_len * self._longest_token
        if len(text) > bound:
            raise PromptError(
                f"This model's maximum context length is {limits.max_model_len} tokens. However, your request has "
                f"{len(text)} characters, which cannot fit (no token stands for more than {self._longest_token}). "
                f"Please reduce the length of the {_noun(param)}.",
                param,
                "context_length_exceeded",
            )

    def _check_count(self, count: int, limits: PromptLimits, room: int, param: str) -> None:
        if count + room > limits.max_model_len:
            wanted = f"{count} input tokens" + (f" and asks for at least {room} more" if room else "")
            raise PromptError(
                f"This model's maximum context length is {limits.max_model_len} tokens. However, your request has "
                f"{wanted}. Please reduce the length of the {_noun(param)}.",
                param,
                "context_length_exceeded",
            )


def _packed(ids: list[int]) -> bytes:
    """Packed; the list is empty afterwards, since millions of numbers given up at once take long as well."""
    packed = array("i")
    for start in range(0, len(ids), PIECE):
        packed.extend(ids[start : start + PIECE])
    while ids:
        del ids[-PIECE:]
    return packed.tobytes()


def _noun(param: str) -> str:
    return "messages" if param == "messages" else "prompt"
