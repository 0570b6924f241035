"""What /tokenize and /detokenize ask of the tokenizer process. Pure: runs in a worker thread or inline.

An answer is one message, and what is generated for others waits behind it in the frontend's ring: answers are bounded,
so that none holds up a stream for long and none is larger than a message may be.
"""

from __future__ import annotations

from typing import Final

from ringserve.engine.prompt_encoder import PromptEncoder, PromptError, PromptLimits
from ringserve.engine.token_text import TokenText
from ringserve.messages.columns import unpack_i32
from ringserve.messages.tokenization import DetokenizeRequest, DetokenizeResult, TokenizeRequest, TokenizeResult

MAX_TOKENS: Final = 4 * 1024 * 1024
"""Ids in a question or an answer: more than 10 MB of prose."""
MAX_STRINGS: Final = 256 * 1024
"""Tokens whose strings are given as well; each becomes an object in the frontend."""
MAX_TEXT_BYTES: Final = 16 * 1024 * 1024
"""Of an answer's text, in UTF-8."""


class TokenQuestions:
    """Answers for one tokenizer. Thread-safe, as the encoder is."""

    def __init__(self, encoder: PromptEncoder, tokens: TokenText) -> None:
        self._encoder = encoder
        self._tokens = tokens

    def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        """The prompt's ids, whether they would fit the model or not.

        Raises:
            PromptError: the prompt is empty or malformed, or has more tokens than an answer holds.
        """
        encoded = self._encoder.encode(request.prompt, None)
        _check_count(encoded.num_tokens, MAX_TOKENS, "prompt", "The prompt has")
        strings = None
        if request.with_strings:
            _check_count(encoded.num_tokens, MAX_STRINGS, "return_token_strs", "With return_token_strs the prompt has")
            ids = unpack_i32(encoded.token_ids)
            strings = tuple(self._tokens.vocabulary_string(token_id) or "" for token_id in ids)
        return TokenizeResult(request.request_id, encoded.token_ids, strings)

    def detokenize(self, request: DetokenizeRequest, limits: PromptLimits | None) -> DetokenizeResult:
        """The text of ids.

        Raises:
            PromptError: an id is outside the vocabulary, or there are more ids or more text than an answer holds.
        """
        _check_count(len(request.token_ids) // 4, MAX_TOKENS, "tokens", "tokens has")
        ids = self._encoder.checked_ids(request.token_ids, limits, "tokens")
        text = self._encoder.decode(ids, skip_special_tokens=False)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_TEXT_BYTES:
            raise PromptError(
                f"The text of tokens has {size} bytes, more than the {MAX_TEXT_BYTES} that one answer holds. Please "
                "ask for it in parts.",
                "tokens",
            )
        return DetokenizeResult(request.request_id, text)


def _check_count(count: int, most: int, param: str, has: str) -> None:
    if count > most:
        raise PromptError(
            f"{has} {count} tokens, more than the {most} that one answer holds. Please ask for it in parts.", param
        )
