"""How tokens are drawn: what a request asks for, and what the model's own configuration says."""

from __future__ import annotations

from ringserve.messages.structs import Part


class SamplingParams(Part, frozen=True):
    """How tokens are drawn. Every default is filled in before the message leaves the frontend.

    The order of operations and the random numbers are those of ARCHITECTURE.md, "Sampling".
    """

    seed: int
    """64-bit key of the request's Philox stream."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias_ids: bytes = b""
    """int32 token ids, ascending."""
    logit_bias_values: bytes = b""
    """float32, one for each id."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is drawn before this many tokens were generated."""
    stop_token_ids: bytes = b""
    """int32."""
    ignore_eos: bool = False
    logprobs: int = -1
    """-1: none; 0: of the chosen token; k: and of the k most likely tokens. From the unprocessed logits."""
    prompt_logprobs: int = -1
    """The same for the prompt's tokens, each given those before it (the first one has none)."""
    allowed_token_ids: bytes = b""
    """int32, ascending: no other token is drawn. Empty: every token may be."""
    bad_word_ids: bytes = b""
    """int32: sequences, one after the other, that no token drawn completes. The tokenizer process fills them in."""
    bad_word_lengths: bytes = b""
    """int32, one for each sequence."""


class SamplingDefaults(Part, frozen=True):
    """The model's generation configuration."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
