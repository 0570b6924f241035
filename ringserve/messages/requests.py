"""A request on its way from the frontend through the tokenizer process to the scheduler, and how it is called off.

    frontend --GenerateRequest--> tokenizer --TokenizedRequest--> scheduler
    frontend --Abort------------> tokenizer --Abort-------------> scheduler
    frontend <-RequestRefused---- tokenizer <-RequestRefused----- scheduler

The tokenizer process aborts, too (a stop string was found), and refuses what it cannot encode.
"""

from __future__ import annotations

from typing import Literal

from ringserve.messages.prompts import Prompt
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.sessions import SessionRef
from ringserve.messages.structs import Message, Part

FinishReason = Literal["stop", "length", "abort", "error"]

ALL_CHOICES = -1
"""``Abort.choice`` for every choice of the request."""


class OutputParams(Part, frozen=True):
    """What the tokenizer process makes of the tokens."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    """Return the prompt's text (and its token ids) with the first output."""
    bad_words: tuple[str, ...] = ()
    """Become ``SamplingParams.bad_word_ids``."""


class ServiceTargets(Part, frozen=True):
    """By when a request wants to be served (``time.monotonic_ns()``); 0: whenever."""

    due_ns: int = 0
    """The last token."""
    first_token_due_ns: int = 0
    time_per_token_ns: int = 0
    """Between tokens."""


NO_TARGETS = ServiceTargets()


class ResumedChoice(Part, frozen=True):
    """What a choice had already produced when its request enters (again)."""

    choice: int
    token_ids: bytes
    """int32 ids generated so far."""
    characters_sent: int
    """Characters of text the client already has; they are not sent again."""
    finish_reason: FinishReason | None = None
    """Set where the choice is over: it must not run again."""


class GenerateRequest(Message, frozen=True):
    """One prompt, ``n`` choices."""

    request_id: int
    """Unique for the server's life; the upper 16 bits are the index of the frontend that answers it."""
    prompt: Prompt
    sampling: SamplingParams
    output: OutputParams
    n: int = 1
    max_tokens: int | None = None
    """None: whatever fits. Clamped to what fits by the tokenizer process."""
    priority: int = 0
    resumed: tuple[ResumedChoice, ...] = ()
    received_ns: int = 0
    """Frontend: the request's head was read."""
    sent_ns: int = 0
    cache_salt: str = ""
    """Keys and values are shared among requests with the same salt only."""
    tenant: str = ""
    """On whose account it runs."""
    targets: ServiceTargets = NO_TARGETS
    session: SessionRef | None = None


class TokenizedRequest(Message, frozen=True):
    """A request as the scheduler sees it: ids and numbers only."""

    request_id: int
    prompt_token_ids: bytes
    sampling: SamplingParams
    n: int
    max_tokens: int
    """New tokens for each choice, counted from the end of the prompt; already clamped; 0 computes the prompt."""
    priority: int = 0
    resumed: tuple[ResumedChoice, ...] = ()
    received_ns: int = 0
    sent_ns: int = 0
    """Tokenizer."""
    cache_salt: str = ""
    tenant: str = ""
    targets: ServiceTargets = NO_TARGETS
    session: SessionRef | None = None


class Abort(Message, frozen=True):
    """End a request, or one choice of it. Unknown or finished: no-op. ``stop``: the tokenizer found a stop string."""

    request_id: int
    choice: int = ALL_CHOICES
    reason: Literal["abort", "stop"] = "abort"


class RequestRefused(Message, frozen=True):
    """The whole request is over; nothing of it was or will be computed."""

    request_id: int
    status: int
    """HTTP status."""
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    """Seconds."""
    predicted_wait: float | None = None
    """Seconds that it would have waited for its first step, where the scheduler can tell."""
