"""Which requests are refused before anything of them is computed."""

from __future__ import annotations

from ringserve.messages import RequestRefused, TokenizedRequest


def why_refused(message: TokenizedRequest, max_model_len: int, known: bool) -> RequestRefused | None:
    """Why a request can never be computed; None if it can. ``known``: one with its id is being served."""
    num_prompt_tokens = len(message.prompt_token_ids) // 4
    if num_prompt_tokens == 0:
        return RequestRefused(message.request_id, 400, "The prompt has no tokens.", param="prompt")
    if message.n < 1 or message.max_tokens < 0:
        text = f"n must be at least 1 and max_tokens at least 0, not {message.n} and {message.max_tokens}."
        return RequestRefused(message.request_id, 400, text)
    if known:
        text = f"Request {message.request_id} is already being served."
        return RequestRefused(message.request_id, 500, text, type="server_error")
    if num_prompt_tokens + 1 > max_model_len:
        return RequestRefused(
            message.request_id,
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{num_prompt_tokens} tokens, which leaves no room for an answer. Please shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    return None
