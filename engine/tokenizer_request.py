"""What the tokenizer process keeps of a request, and how a request becomes one.

``RequestAdmission.admit`` is the expensive part (template, encoding, replay of resumed tokens) and runs in a worker
thread; it touches nothing but its arguments and the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ringserve.engine.choice_output import ChoiceOutput
from ringserve.engine.detokenizer import DetokenizerFactory
from ringserve.engine.prompt_encoder import EncodedPrompt, PromptEncoder, PromptError, PromptLimits
from ringserve.engine.stop_strings import StopStrings
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.logprobs import TokenLogprob
from ringserve.messages.requests import GenerateRequest, OutputParams, ResumedChoice, TokenizedRequest
from ringserve.messages.sampling import SamplingParams


@dataclass(slots=True)
class RequestState:
    """A request that has not ended."""

    request_id: int
    source: str
    """The frontend that answers it."""
    n: int
    admitted: AdmittedRequest | None = None
    """None while it waits for its encoding."""
    aborted: bool = False
    """Aborted while it waited: its encoding is not needed any more."""
    tokenized_ns: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class AdmittedRequest:
    """A request after encoding."""

    prompt: EncodedPrompt
    output: OutputParams
    wants_prompt_logprobs: bool
    max_tokens: int
    max_tokens_clamped: bool
    received_ns: int
    choices: dict[int, ChoiceOutput]
    """The open choices."""
    stopped: list[tuple[int, ChoiceOutput]]
    """Choices whose resumed tokens already complete a stop string."""
    forward: TokenizedRequest
    """For the scheduler."""

    def stamped(self, sent_ns: int) -> TokenizedRequest:
        """The scheduler's message with the time of sending."""
        return msgspec.structs.replace(self.forward, sent_ns=sent_ns)


class RequestAdmission:
    """Turns ``GenerateRequest`` into ``AdmittedRequest``."""

    def __init__(self, encoder: PromptEncoder, detokenizers: DetokenizerFactory) -> None:
        self._encoder = encoder
        self._detokenizers = detokenizers

    def admit(self, request: GenerateRequest, limits: PromptLimits) -> AdmittedRequest:
        """Encode the prompt, clamp ``max_tokens``, replay resumed tokens.

        Raises:
            PromptError: the request is refused.
        """
        output = request.output
        room = 0 if request.max_tokens == 0 else 1
        prompt = self._encoder.encode(
            request.prompt, limits, room=room, decode=output.echo, skip_special_tokens=output.skip_special_tokens
        )
        space = limits.max_model_len - prompt.num_tokens
        max_tokens = space if request.max_tokens is None else min(request.max_tokens, space)
        choices, stopped, resumed = self._open_choices(request)
        forward = TokenizedRequest(
            request_id=request.request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=self._sampling(request, limits),
            n=request.n,
            max_tokens=max_tokens,
            priority=request.priority,
            resumed=resumed,
            received_ns=request.received_ns,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            targets=request.targets,
            session=request.session,
        )
        return AdmittedRequest(
            prompt=prompt,
            output=output,
            wants_prompt_logprobs=request.sampling.prompt_logprobs >= 0,
            max_tokens=max_tokens,
            max_tokens_clamped=request.max_tokens is not None and max_tokens < request.max_tokens,
            received_ns=request.received_ns,
            choices=choices,
            stopped=stopped,
            forward=forward,
        )

    def _sampling(self, request: GenerateRequest, limits: PromptLimits) -> SamplingParams:
        """With the tokens of bad words."""
        sampling, words = request.sampling, request.output.bad_words
        if not words:
            return sampling
        sequences = self._encoder.bad_word_ids(words, limits)
        # Any of them may come to its last token: what is left then must be something.
        left = set(unpack_i32(sampling.allowed_token_ids)) or set(range(limits.vocab_size))
        left -= {sequence[-1] for sequence in sequences}
        if sampling.min_tokens:
            left -= set(unpack_i32(sampling.stop_token_ids))
            left -= limits.eos_token_ids if not sampling.ignore_eos else set()
        if not left:
            raise PromptError(
                "bad_words must leave a token that may be drawn and that none of them ends with.", "bad_words"
            )
        return msgspec.structs.replace(
            sampling,
            bad_word_ids=pack_i32(token for sequence in sequences for token in sequence),
            bad_word_lengths=pack_i32(map(len, sequences)),
        )

    def _open_choices(
        self, request: GenerateRequest
    ) -> tuple[dict[int, ChoiceOutput], list[tuple[int, ChoiceOutput]], tuple[ResumedChoice, ...]]:
        """The open choices, those that a replayed stop string ended, and ``resumed`` as the scheduler must see it."""
        resumed = {entry.choice: entry for entry in request.resumed}
        choices: dict[int, ChoiceOutput] = {}
        stopped: list[tuple[int, ChoiceOutput]] = []
        for choice in range(request.n):
            entry = resumed.get(choice)
            if entry is not None and entry.finish_reason is not None:
                continue
            made = self._make_choice(request.sampling, request.output, entry.characters_sent if entry else 0)
            if entry is not None and not _replay(made, entry):
                stopped.append((choice, made))
                resumed[choice] = msgspec.structs.replace(entry, finish_reason="stop")
            else:
                choices[choice] = made
        return choices, stopped, tuple(resumed[choice] for choice in sorted(resumed))

    def _make_choice(self, sampling: SamplingParams, output: OutputParams, characters_sent: int) -> ChoiceOutput:
        return ChoiceOutput(
            self._detokenizers.create(output.skip_special_tokens),
            StopStrings(output.stop, output.include_stop_str_in_output),
            sampling.min_tokens,
            characters_sent,
        )


def _replay(output: ChoiceOutput, entry: ResumedChoice) -> bool:
    """Feed what was generated before; False if a stop string ends the choice there."""
    for token_id in unpack_i32(entry.token_ids):
        output.feed(token_id)
        if output.stop is not None:
            return False
    return True
