"""The vocabulary of the four processes: one closed union of Structs for each ring.

    frontend --FrontendMessage--> tokenizer --SchedulerInbound--> scheduler --SchedulerOutput--> executor
    frontend <--FrontendInbound-- tokenizer <--SchedulerMessage-- scheduler <--ExecutorMessage-- executor

Messages are columns where there is one entry for each sequence of a step: token ids travel as packed native
``int32`` bytes, never as lists (encoding 1,024 ids costs 0.4 us instead of 8, decoding 0.5 instead of 48).
Every ``*_ns`` field is ``time.monotonic_ns()`` of the process named in its comment; one machine, one clock.

This module knows no transport, no HTTP and no model.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]

ALL_CHOICES = -1
"""``Abort.choice`` for every choice of the request."""


def pack_i32(values: Iterable[int]) -> bytes:
    """Pack integers as native int32 bytes."""
    return array("i", values).tobytes()


def unpack_i32(data: bytes) -> memoryview[int]:
    """A view of packed int32 values; indexing and ``tolist()`` give Python ints."""
    return memoryview(data).cast("i")


def pack_u64(values: Iterable[int]) -> bytes:
    """Pack integers as native uint64 bytes."""
    return array("Q", values).tobytes()


def unpack_u64(data: bytes) -> memoryview[int]:
    """A view of packed uint64 values."""
    return memoryview(data).cast("Q")


def pack_f32(values: Iterable[float]) -> bytes:
    """Pack floats as native float32 bytes."""
    return array("f", values).tobytes()


def unpack_f32(data: bytes) -> memoryview[float]:
    """A view of packed float32 values."""
    return memoryview(data).cast("f")


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a message."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """A member of a ring's union."""


# ---------------------------------------------------------------------------------------------------- parts


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


class SessionRef(Part, frozen=True):
    """A conversation whose pages are kept from turn to turn."""

    owner: str
    """Who alone may use, list and drop it: the name of the key that it came with, or what a header says."""
    session_id: str


class SessionInfo(Part, frozen=True):
    """What is kept of a session."""

    session_id: str
    num_tokens: int
    """A next turn that begins with them does not compute them again."""
    num_pages: int
    age_ns: int
    """Since its first turn ended."""
    idle_ns: int
    """Since it was used last."""
    expires_in_ns: int


class ChatPrompt(Message, frozen=True):
    """A conversation that the tokenizer process renders with the model's chat template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = {}


class TextPrompt(Message, frozen=True):
    """A text; special tokens (BOS) are added as the tokenizer's own post-processor says, unless switched off."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(Message, frozen=True):
    """int32 token ids, taken as they are."""

    token_ids: bytes


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class ResumedChoice(Part, frozen=True):
    """What a choice had already produced when its request enters (again)."""

    choice: int
    token_ids: bytes
    """int32 ids generated so far."""
    characters_sent: int
    """Characters of text the client already has; they are not sent again."""
    finish_reason: FinishReason | None = None
    """Set where the choice is over: it must not run again."""


class LogprobColumns(Part, frozen=True):
    """Log probabilities of several tokens, flattened.

    Entry ``i`` has ``counts[i]`` candidates (0: none were asked for). Its first candidate is the token itself; the
    most likely tokens follow in descending order (the token itself may be among them again).
    """

    counts: bytes
    """int32, one for each token."""
    token_ids: bytes
    """int32, sum(counts)."""
    values: bytes
    """float32 natural logarithms, sum(counts). -inf never travels: it is -9999.0."""
    ranks: bytes
    """int32, one for each token with candidates: 1 for the most likely token."""


class PromptLogprobs(Part, frozen=True):
    """Log probabilities of the prompt tokens ``[start, start + len(columns.counts))``; position 0 has count 0."""

    request_id: int
    start: int
    columns: LogprobColumns


class StepTimes(Part, frozen=True):
    """Where one step spent its time (``time.monotonic_ns()``)."""

    step_id: int
    scheduled_ns: int
    """Scheduler: the step was planned and put into the executor's ring."""
    executor_received_ns: int
    executor_started_ns: int
    """Executor: the forward pass began."""
    executor_finished_ns: int
    """Executor: tokens are sampled, the result is about to be sent."""
    result_received_ns: int = 0
    """Scheduler."""
    num_tokens: int = 0
    num_sequences: int = 0


class EngineStats(Part, frozen=True):
    """Counters since the scheduler started, and gauges, as of the step that carries them."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    """Usable pages (page 0 is never given out and not counted)."""
    num_preemptions: int
    preempted_tokens: int
    """Tokens computed again after preemption; what the prefix cache still had is not among them."""
    num_steps: int
    num_computed_tokens: int
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    num_sessions: int = 0
    executor_busy_ns: int = 0
    """The executor computed steps."""
    executor_idle_ns: int = 0
    """It had none although sequences were to be computed: the gaps between a step's end and the next one's start."""
    swapped_out_pages: int = 0
    """KV pages of preempted sequences copied to the host."""
    swapped_in_pages: int = 0
    """Those that came back; the others were aborted meanwhile, or the prefix cache still had them."""
    swapped_in_tokens: int = 0
    """Tokens that were not computed again after preemption, since they came back from the host."""
    num_swapped_pages: int = 0
    """Host pages in use now."""
    num_host_pages: int = 0
    step_costs: tuple[float, ...] = ()
    """What the step-time model has come to, once it is worth acting on: seconds, in the order of ``STEP_COSTS``."""


STEP_COSTS = ("base", "sequence", "token", "prompt_token", "context_token", "pair")
"""Terms of a step's time: what it costs as such, and for each of these (``engine/step_time.py``)."""


class SequenceStart(Part, frozen=True):
    """What is known when a sequence's first output leaves the scheduler."""

    row: int
    queued_ns: int
    """Scheduler: the request entered the queue."""
    first_scheduled_ns: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class SequenceFinish(Part, frozen=True):
    """A sequence's end. Exactly one for each (request, choice)."""

    row: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The stop token (not eos) that ended it."""
    num_preemptions: int = 0
    message: str = ""
    """With reason ``error``."""


# ------------------------------------------------------------------------- frontend -> tokenizer -> scheduler


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


class TokenizeRequest(Message, frozen=True):
    """Answered by TokenizeResult or RequestRefused."""

    request_id: int
    prompt: Prompt
    with_strings: bool = False


class DetokenizeRequest(Message, frozen=True):
    """Answered by DetokenizeResult or RequestRefused."""

    request_id: int
    token_ids: bytes


class Abort(Message, frozen=True):
    """End a request, or one choice of it. Unknown or finished: no-op. ``stop``: the tokenizer found a stop string."""

    request_id: int
    choice: int = ALL_CHOICES
    reason: Literal["abort", "stop"] = "abort"


class CheckIntegrity(Message, frozen=True):
    """Debugging: every process on the way adds what it holds; the scheduler answers with IntegrityReport."""

    request_id: int
    tokenizer_requests: int = 0
    """Requests the tokenizer process still holds."""


class ListSessions(Message, frozen=True):
    """Answered by the scheduler with SessionList."""

    request_id: int
    owner: str


class DropSession(Message, frozen=True):
    """Keep a session no longer. Answered by the scheduler with SessionDropped."""

    request_id: int
    session: SessionRef


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


FrontendMessage = (
    GenerateRequest | TokenizeRequest | DetokenizeRequest | Abort | CheckIntegrity | ListSessions | DropSession
)
SchedulerInbound = TokenizedRequest | Abort | CheckIntegrity | ListSessions | DropSession

# ------------------------------------------------------------------------------------ scheduler -> executor


class NewSequence(Part, frozen=True):
    """A sequence sent whole: new, resumed or preempted before. Resets its slot."""

    slot: int
    token_ids: bytes
    """int32: the prompt and whatever was generated before."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values already lie in the pages (prefix hits), or do once this step's swaps are done."""
    choice: int
    sampling: SamplingParams
    max_tokens: int


class PageSwaps(Part, frozen=True):
    """Pages that go to the host's swap space, and pages that come back; all columns int32.

    Done before the step is: first everything that goes out, entry by entry, then everything that comes in. A page that
    goes out may be among the step's ``new_pages``, or be one that something comes into. What comes in may have gone out
    with this very message.
    """

    out_pages: bytes
    """Of the KV pool."""
    out_host_pages: bytes
    """Where each of them goes: 0 .. ``num_host_pages`` - 1."""
    in_pages: bytes
    """Of the KV pool."""
    in_host_pages: bytes
    """Where each of them comes from; free afterwards."""


class SchedulerOutput(Message, frozen=True):
    """One step: only what changed since the last one.

    Row ``i`` advances the sequence in ``slots[i]`` by ``num_tokens[i]`` of its tokens. The executor keeps, for each
    slot, all token ids (it appends what it samples itself), the number computed, and the block table. A row that
    reaches the last known token samples one.
    """

    step_id: int
    new_sequences: tuple[NewSequence, ...]
    """Each of them also has a row."""
    slots: bytes
    """int32, distinct."""
    num_tokens: bytes
    """int32, >= 1."""
    new_page_counts: bytes
    """int32, one for each row: how many entries of ``new_pages`` are appended to its block table."""
    new_pages: bytes
    """int32 page ids, in the order of the rows."""
    freed_slots: bytes
    """int32: freed before this step's rows are looked at; the slot may be reused by ``new_sequences`` at once."""
    sent_ns: int = 0
    swaps: PageSwaps | None = None
    """None in the usual step."""


# ------------------------------------------------------------------------------------ executor -> scheduler


class SamplingDefaults(Part, frozen=True):
    """The model's generation configuration."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ExecutorReady(Message, frozen=True):
    """Everything discovered at start. Forwarded up to the frontend."""

    vocab_size: int
    """Rows of the model's output layer: valid token ids are below it."""
    max_model_len: int
    eos_token_ids: bytes
    """int32: all ids that end a sequence."""
    num_pages: int
    """Usable pages; their ids are 1 .. num_pages."""
    page_size: int
    """Tokens per page."""
    max_num_seqs: int
    """Slots 0 .. max_num_seqs - 1."""
    max_num_batched_tokens: int
    dtype: str
    kv_dtype: str
    device: str
    architecture: str
    defaults: SamplingDefaults
    num_threads: int = 1
    load_seconds: float = 0.0
    model_impl: str = "transformers"
    """``fast`` or ``transformers``."""
    quantization: str = "none"
    instructions: str = ""
    """What the fast path's kernels use: ``avx512`` or ``portable``."""
    num_host_pages: int = 0
    """Pages of the swap space, with ids 0 .. num_host_pages - 1; 0: sequences are not swapped."""
    bytes_per_page: int = 0
    """Of a KV page, over all layers. With a swap space only, as is the next one."""
    swap_bytes_per_second: float = 0.0
    """Between the KV pool and the swap space, one way, measured at start."""


class LoadProgress(Message, frozen=True):
    """How far the executor's start is: shown in /health and by the supervisor's progress bar."""

    stage: str
    fraction: float


class SlotPromptLogprobs(Part, frozen=True):
    """PromptLogprobs by slot."""

    slot: int
    start: int
    columns: LogprobColumns


class ModelRunnerOutput(Message, frozen=True):
    """A step's result: one row for each sequence that sampled a token, in the order of the step's rows."""

    step_id: int
    slots: bytes
    """int32."""
    token_ids: bytes
    """int32, one for each slot."""
    logprobs: LogprobColumns | None
    prompt_logprobs: tuple[SlotPromptLogprobs, ...]
    received_ns: int
    started_ns: int
    sent_ns: int
    failed_slots: tuple[tuple[int, str], ...] = ()
    """Sequences that could not be sampled (for example no finite logit), with the reason; no row above."""


ExecutorMessage = ExecutorReady | LoadProgress | ModelRunnerOutput

# ------------------------------------------------------------------------ scheduler -> tokenizer -> frontend


class TokenOutputs(Message, frozen=True):
    """A step's new tokens: one row for each (request, choice). A row may have no token (a finish alone)."""

    request_ids: bytes
    """uint64."""
    choices: bytes
    """int32."""
    token_counts: bytes
    """int32."""
    token_ids: bytes
    """int32, sum(token_counts)."""
    starts: tuple[SequenceStart, ...]
    finishes: tuple[SequenceFinish, ...]
    logprobs: LogprobColumns | None
    """One entry for each token."""
    prompt_logprobs: tuple[PromptLogprobs, ...]
    """For choice 0; positions come in ascending order, each once."""
    times: StepTimes | None
    stats: EngineStats
    sent_ns: int = 0


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


class IntegrityReport(Message, frozen=True):
    """Answer to CheckIntegrity."""

    request_id: int
    problems: tuple[str, ...]
    """What ``check_integrity()`` found; empty when sound."""
    num_free_pages: int
    num_pages: int
    scheduler_requests: int
    tokenizer_requests: int
    num_free_slots: int


class SessionList(Message, frozen=True):
    """Answer to ListSessions."""

    request_id: int
    sessions: tuple[SessionInfo, ...]


class SessionDropped(Message, frozen=True):
    """Answer to DropSession."""

    request_id: int
    found: bool


SchedulerMessage = (
    TokenOutputs | RequestRefused | ExecutorReady | LoadProgress | IntegrityReport | SessionList | SessionDropped
)


class CandidateLogprob(Part, frozen=True):
    """A token's text and log probability."""

    token_id: int
    token: str
    raw: bytes
    logprob: float


class TokenLogprob(Part, frozen=True):
    """One position: the token itself, and the most likely ones."""

    token_id: int
    token: str
    raw: bytes
    logprob: float | None
    """None for a prompt's first token."""
    rank: int
    top: tuple[CandidateLogprob, ...] = ()


class TextLogprobs(Part, frozen=True):
    """Log probabilities of a row's new tokens. They may come later than their tokens' text, never earlier, and all
    have come by the finish."""

    row: int
    tokens: tuple[TokenLogprob, ...]


class TextStart(Part, frozen=True):
    """What is known with a choice's first output."""

    row: int
    num_prompt_tokens: int
    num_cached_tokens: int
    received_ns: int
    """Frontend."""
    tokenized_ns: int
    """Tokenizer: sent to the scheduler."""
    queued_ns: int
    first_scheduled_ns: int
    max_tokens: int
    """After clamping."""
    max_tokens_clamped: bool = False
    prompt_token_ids: bytes = b""
    """With ``echo``."""
    prompt_text: str | None = None
    """With ``echo``: the text given, or the decoded ids."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class TextFinish(Part, frozen=True):
    """A choice's end. Exactly one for each (request, choice)."""

    row: int
    reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token id that ended it."""
    num_output_tokens: int
    """Up to and including the token that completed the stop."""
    num_preemptions: int = 0
    message: str = ""
    """With reason ``error``."""


class TextOutputs(Message, frozen=True):
    """A step's new text: one row for each (request, choice)."""

    request_ids: bytes
    """uint64."""
    choices: bytes
    """int32."""
    texts: tuple[str, ...]
    token_counts: bytes
    """int32."""
    token_ids: bytes
    """int32, sum(token_counts). Tokens come with the step that made them, even where their text is still held back."""
    starts: tuple[TextStart, ...]
    finishes: tuple[TextFinish, ...]
    logprobs: tuple[TextLogprobs, ...]
    times: StepTimes | None
    stats: EngineStats | None
    tokens_sent_ns: int
    """Scheduler."""
    received_ns: int
    """Tokenizer."""
    sent_ns: int
    """Tokenizer."""


class TokenizeResult(Message, frozen=True):
    """Answer to TokenizeRequest."""

    request_id: int
    token_ids: bytes
    token_strings: tuple[str, ...] | None


class DetokenizeResult(Message, frozen=True):
    """Answer to DetokenizeRequest."""

    request_id: int
    text: str


FrontendInbound = (
    TextOutputs
    | RequestRefused
    | ExecutorReady
    | LoadProgress
    | IntegrityReport
    | SessionList
    | SessionDropped
    | TokenizeResult
    | DetokenizeResult
)

# --------------------------------------------------------------------------------------- child -> supervisor


class Progress(Message, frozen=True):
    """A child's start-up progress, for the terminal."""

    stage: str
    fraction: float


class Started(Message, frozen=True):
    """A child is up. ``summary`` is what the supervisor's closing line says of it."""

    summary: dict[str, str | int | float]


class StartFailed(Message, frozen=True):
    """A child cannot start: one line with the remedy."""

    message: str


SupervisorInbound = Progress | Started | StartFailed

RINGS: dict[tuple[str, str], Any] = {
    ("frontend", "tokenizer"): FrontendMessage,
    ("tokenizer", "scheduler"): SchedulerInbound,
    ("scheduler", "executor"): SchedulerOutput,
    ("executor", "scheduler"): ExecutorMessage,
    ("scheduler", "tokenizer"): SchedulerMessage,
    ("tokenizer", "frontend"): FrontendInbound,
}
"""What travels on the ring from one kind of process to another."""
