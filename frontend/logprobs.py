"""Log probabilities in the two shapes of OpenAI's answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ringserve.messages.logprobs import CandidateLogprob, TokenLogprob

_LEAST = -9999.0


def chat_logprobs(tokens: Iterable[TokenLogprob], num_top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat answer."""
    return {
        "content": [
            {
                "token": each.token,
                "logprob": _LEAST if each.logprob is None else each.logprob,
                "bytes": list(each.raw),
                "top_logprobs": [_candidate(candidate) for candidate in each.top[:num_top]],
            }
            for each in tokens
        ],
        "refusal": None,
    }


def _candidate(candidate: CandidateLogprob) -> dict[str, Any]:
    return {"token": candidate.token, "logprob": candidate.logprob, "bytes": list(candidate.raw)}


def completion_logprobs(tokens: Sequence[TokenLogprob], num_top: int, offset: int) -> tuple[dict[str, Any], int]:
    """``choices[].logprobs`` of a plain completion, and the offset after its tokens.

    ``offset`` is where the first token's text begins in the choice's text, in characters. ``top_logprobs`` holds the
    token itself besides the ``num_top`` most likely ones; the first token of a prompt has no probability (null).
    """
    offsets: list[int] = []
    for each in tokens:
        offsets.append(offset)
        offset += len(each.token)
    body = {
        "tokens": [each.token for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [_top(each, num_top) for each in tokens],
        "text_offset": offsets,
    }
    return body, offset


def _top(token: TokenLogprob, num_top: int) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    return {token.token: token.logprob, **{each.token: each.logprob for each in token.top[:num_top]}}
