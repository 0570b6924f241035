"""What takes a model's place in the scheduler's tests: the next token is a hash of the whole token history.

``run_alone`` says, by its own words, what a choice must yield whatever else runs.
"""

from __future__ import annotations

import zlib

from ringserve.messages.columns import pack_i32, pack_u64, unpack_i32
from ringserve.messages.requests import TokenizedRequest
from ringserve.messages.sampling import SamplingParams

VOCAB_SIZE = 40
EOS = (1, 2)


def draw(history: list[int], num_prompt_tokens: int, choice: int, sampling: SamplingParams) -> int:
    """The token after ``history``; before min_tokens none that could end the sequence."""
    token = zlib.crc32(pack_u64([sampling.seed, choice, *history])) % VOCAB_SIZE
    if len(history) - num_prompt_tokens < sampling.min_tokens:
        barred = {*unpack_i32(sampling.stop_token_ids), *(() if sampling.ignore_eos else EOS)}
        while token in barred:
            token = (token + 1) % VOCAB_SIZE
    return token


def run_alone(request: TokenizedRequest, choice: int, max_model_len: int) -> tuple[list[int], str, int | None]:
    """All generated tokens of a choice that nothing disturbs, why it ends, and the stop token."""
    history = list(unpack_i32(request.prompt_token_ids))
    num_prompt = len(history)
    if request.max_tokens == 0:
        return [], "length", None
    while True:
        history.append(draw(history, num_prompt, choice, request.sampling))
        generated = history[num_prompt:]
        if generated[-1] in EOS and not request.sampling.ignore_eos:
            return generated, "stop", None
        if generated[-1] in unpack_i32(request.sampling.stop_token_ids).tolist():
            return generated, "stop", generated[-1]
        if len(generated) == request.max_tokens or len(history) == max_model_len:
            return generated, "length", None


def position_logprob(history: list[int]) -> float:
    """Stands for the log probability of the last token of ``history``."""
    return -float(zlib.crc32(pack_i32(history)) % 1000)
