"""An executor without a model, and an engine of it and a real scheduler, for the scheduler's tests.

The next token is a hash of the whole token history, read back from simulated pages: a page that is reused too early,
a block table that is wrong or a token lost in a recompute changes every token after it. ``run_alone`` says, by its own
words, what a choice must yield whatever else runs.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import msgspec

from ringserve.config import SchedulerConfig
from ringserve.engine.scheduler import Scheduler
from ringserve.engine.scheduler_outputs import OutputBatch, pack_token_outputs
from ringserve.engine.swap_space import SwapCosts
from ringserve.messages.columns import pack_f32, pack_i32, pack_u64, unpack_f32, unpack_i32, unpack_u64
from ringserve.messages.logprobs import LogprobColumns, PromptLogprobs, SlotPromptLogprobs
from ringserve.messages.requests import NO_TARGETS, RequestRefused, ResumedChoice, ServiceTargets, TokenizedRequest
from ringserve.messages.sampling import SamplingDefaults, SamplingParams
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.stats import StepTimes
from ringserve.messages.steps import ModelRunnerOutput, NewSequence, PageSwaps, SchedulerOutput
from ringserve.messages.token_outputs import SequenceFinish, SequenceStart, TokenOutputs

VOCAB_SIZE = 40
EOS = (1, 2)


def executor_ready(
    page_size: int = 16,
    num_pages: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    num_host_pages: int = 0,
    swap_bytes_per_second: float = 1e30,
) -> ExecutorReady:
    return ExecutorReady(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=pack_i32(EOS),
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        architecture="Fake",
        defaults=SamplingDefaults(),
        num_host_pages=num_host_pages,
        bytes_per_page=1000 if num_host_pages else 0,
        swap_bytes_per_second=swap_bytes_per_second if num_host_pages else 0.0,
    )


def make_request(
    request_id: int,
    num_prompt_tokens: int,
    max_tokens: int,
    n: int = 1,
    ignore_eos: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    resumed: tuple[ResumedChoice, ...] = (),
    family: int | None = None,
    num_shared_tokens: int = 0,
    cache_salt: str = "",
    priority: int = 0,
    tenant: str = "",
    targets: ServiceTargets = NO_TARGETS,
) -> TokenizedRequest:
    """A request whose prompt and seed follow from its id; the prompts of a ``family`` begin with the same tokens."""
    sources = [family if family is not None and i < num_shared_tokens else request_id for i in range(num_prompt_tokens)]
    prompt = [zlib.crc32(b"%d/%d" % (source, i)) % VOCAB_SIZE for i, source in enumerate(sources)]
    sampling = SamplingParams(
        seed=request_id,
        min_tokens=min_tokens,
        stop_token_ids=pack_i32(stop_token_ids),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return TokenizedRequest(
        request_id,
        pack_i32(prompt),
        sampling,
        n,
        max_tokens,
        priority=priority,
        resumed=resumed,
        cache_salt=cache_salt,
        tenant=tenant,
        targets=targets,
    )


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


def first_stop(request_id: int, num_prompt_tokens: int, token_ids: tuple[int, ...] = EOS) -> int:
    """Number of tokens that the request generates up to and including the first of these."""
    tokens, _, _ = run_alone(make_request(request_id, num_prompt_tokens, 400), 0, 512)
    return next(i for i, token in enumerate(tokens) if token in token_ids) + 1


def position_logprob(history: list[int]) -> float:
    """Stands for the log probability of the last token of ``history``."""
    return -float(zlib.crc32(pack_i32(history)) % 1000)


@dataclass
class Slot:
    """What the executor keeps of a sequence."""

    sequence: NewSequence
    tokens: list[int]
    num_computed: int
    pages: list[int] = field(default_factory=list)


class FakeExecutor:
    """Holds a scheduler to the contract of ``SchedulerOutput``; AssertionError where it is broken."""

    def __init__(self, ready: ExecutorReady) -> None:
        self.ready = ready
        self.slots: dict[int, Slot] = {}
        self.memory: dict[tuple[int, int], int] = {}
        """By (page, position in it)."""
        self.host_memory: dict[int, dict[int, int]] = {}
        self.pages_out = self.pages_in = 0
        self.tokens_in = 0
        """In the pages that came back from the host."""
        self.next_step_id = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        """Of them, those that were computed for the same sequence before."""
        self.most_computed: dict[tuple[int, int], int] = {}
        """(seed, choice): tokens computed of it so far."""
        self.cached_tokens = 0
        self.spans: list[tuple[int, int]] = []
        """(tokens computed before, tokens of the step) of the last step's rows."""
        self.fail_at: dict[tuple[int, int], int] = {}
        """(seed, choice): number of generated tokens at which sampling fails."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert step.step_id == self.next_step_id
        self.next_step_id += 1
        if step.swaps is not None:
            self._swap(step.swaps)
        for number in unpack_i32(step.freed_slots):
            del self.slots[number]
        rows = list(unpack_i32(step.slots))
        counts = list(unpack_i32(step.num_tokens))
        assert len(set(rows)) == len(rows) == len(counts) > 0
        assert min(counts) >= 1
        assert sum(counts) <= self.ready.max_num_batched_tokens
        for new in step.new_sequences:
            assert 0 <= new.slot < self.ready.max_num_seqs
            assert new.slot in rows
            assert new.slot not in self.slots, "a slot that was not freed is given to another sequence"
            self.slots[new.slot] = Slot(new, list(unpack_i32(new.token_ids)), new.num_computed_tokens)
        self._take_pages(step, rows)
        came_back = set(unpack_i32(step.swaps.in_pages).tolist()) if step.swaps is not None else set()
        for new in step.new_sequences:
            self._check_cached(self.slots[new.slot])
            places = [i for i, page in enumerate(self.slots[new.slot].pages) if page in came_back]
            if places:
                assert places == list(range(places[0], places[-1] + 1))
                self.tokens_in += new.num_computed_tokens - places[0] * self.page_size
        sampled: list[tuple[int, int, LogprobColumns]] = []
        failed: list[tuple[int, str]] = []
        prompt_logprobs: list[SlotPromptLogprobs] = []
        self.spans = []
        for number, count in zip(rows, counts, strict=True):
            slot = self.slots[number]
            first, end = slot.num_computed, slot.num_computed + count
            self.spans.append((first, count))
            self._compute(slot, end)
            if slot.sequence.sampling.prompt_logprobs >= 0 and first < slot.sequence.num_prompt_tokens:
                prompt_logprobs.append(self._prompt_logprobs(number, slot, first, end))
            if end < len(slot.tokens) or slot.sequence.max_tokens == 0:
                continue
            num_generated = len(slot.tokens) - slot.sequence.num_prompt_tokens
            sampling = slot.sequence.sampling
            history = [self.memory[slot.pages[p // self.page_size], p % self.page_size] for p in range(end)]
            assert history == slot.tokens, "the pages hold other tokens than the sequence has"
            token = draw(history, slot.sequence.num_prompt_tokens, slot.sequence.choice, sampling)
            slot.tokens.append(token)
            assert num_generated + 1 <= slot.sequence.max_tokens, "drawn beyond max_tokens"
            assert len(slot.tokens) <= self.ready.max_model_len, "drawn beyond max_model_len"
            if self.fail_at.get((sampling.seed, slot.sequence.choice)) == num_generated:
                failed.append((number, "no finite logit"))
                continue
            width = sampling.logprobs + 1
            sampled.append(
                (
                    number,
                    token,
                    LogprobColumns(
                        counts=pack_i32([width]),
                        token_ids=pack_i32([token, *range(width - 1)] if width else []),
                        values=pack_f32([position_logprob(slot.tokens)] * width),
                        ranks=pack_i32([len(slot.tokens)] if width else []),
                    ),
                )
            )
        logprobs = None
        if any(columns.token_ids for _, _, columns in sampled):
            logprobs = LogprobColumns(
                b"".join(c.counts for _, _, c in sampled),
                b"".join(c.token_ids for _, _, c in sampled),
                b"".join(c.values for _, _, c in sampled),
                b"".join(c.ranks for _, _, c in sampled),
            )
        return ModelRunnerOutput(
            step_id=step.step_id,
            slots=pack_i32(number for number, _, _ in sampled),
            token_ids=pack_i32(token for _, token, _ in sampled),
            logprobs=logprobs,
            prompt_logprobs=tuple(prompt_logprobs),
            received_ns=1,
            started_ns=2,
            sent_ns=3,
            failed_slots=tuple(failed),
        )

    @property
    def page_size(self) -> int:
        return self.ready.page_size

    def _swap(self, swaps: PageSwaps) -> None:
        """Out, then in; a page that nobody has asked to be written reads as nothing afterwards."""
        out, out_host = unpack_i32(swaps.out_pages).tolist(), unpack_i32(swaps.out_host_pages).tolist()
        back, back_host = unpack_i32(swaps.in_pages).tolist(), unpack_i32(swaps.in_host_pages).tolist()
        assert len(out) == len(out_host)
        assert len(back) == len(back_host)
        assert out or back, "an empty message of swaps"
        assert len(set(out_host)) == len(out_host)
        assert len(set(back)) == len(back)
        assert len(set(back_host)) == len(back_host)
        assert all(1 <= page <= self.ready.num_pages for page in (*out, *back))
        assert all(0 <= page < self.ready.num_host_pages for page in (*out_host, *back_host))
        for page, host_page in zip(out, out_host, strict=True):
            cells = {at: token for at in range(self.page_size) if (token := self.memory.get((page, at))) is not None}
            assert cells, "a page that nothing was written to goes out"
            self.host_memory[host_page] = cells
        for page, host_page in zip(back, back_host, strict=True):
            for at in range(self.page_size):
                self.memory.pop((page, at), None)
            self.memory.update({(page, at): token for at, token in self.host_memory.pop(host_page).items()})
        self.pages_out += len(out)
        self.pages_in += len(back)

    def _take_pages(self, step: SchedulerOutput, rows: list[int]) -> None:
        pages = list(unpack_i32(step.new_pages))
        counts = list(unpack_i32(step.new_page_counts))
        assert len(counts) == len(rows)
        assert sum(counts) == len(pages)
        for number, count in zip(rows, counts, strict=True):
            self.slots[number].pages.extend(pages[:count])
            del pages[:count]
        for slot in self.slots.values():
            assert len(set(slot.pages)) == len(slot.pages), "a sequence has a page twice"
            assert all(1 <= page <= self.ready.num_pages for page in slot.pages)

    def _check_cached(self, slot: Slot) -> None:
        """What a new sequence need not compute lies in its pages before any row of the step is looked at."""
        assert 0 <= slot.num_computed < len(slot.tokens), "nothing is left to compute"
        found = [self._read(slot, position) for position in range(slot.num_computed)]
        assert found == slot.tokens[: slot.num_computed], "the cached pages hold other tokens"
        self.cached_tokens += slot.num_computed

    def _read(self, slot: Slot, position: int) -> int | None:
        return self.memory.get((slot.pages[position // self.page_size], position % self.page_size))

    def _compute(self, slot: Slot, end: int) -> None:
        assert end <= len(slot.tokens), "asked to compute tokens that are not known"
        assert end <= len(slot.pages) * self.page_size, "the pages do not hold what is computed"
        others = [page for other in self.slots.values() if other is not slot for page in other.pages]
        for position in range(slot.num_computed, end):
            page = slot.pages[position // self.page_size]
            assert page not in others, "a page that others hold is written to"
            self.memory[page, position % self.page_size] = slot.tokens[position]
        self.computed_tokens += end - slot.num_computed
        name = slot.sequence.sampling.seed, slot.sequence.choice
        before = self.most_computed.get(name, 0)
        self.recomputed_tokens += max(0, min(before, end) - slot.num_computed)
        self.most_computed[name] = max(before, end)
        slot.num_computed = end

    @staticmethod
    def _prompt_logprobs(number: int, slot: Slot, first: int, end: int) -> SlotPromptLogprobs:
        """Logits of position p are about token p + 1; nothing is about token 0."""
        start = first + 1 if first else 0
        positions = range(start, min(end + 1, slot.sequence.num_prompt_tokens))
        known = [p for p in positions if p > 0]
        columns = LogprobColumns(
            counts=pack_i32(int(p > 0) for p in positions),
            token_ids=pack_i32(slot.tokens[p] for p in known),
            values=pack_f32(position_logprob(slot.tokens[: p + 1]) for p in known),
            ranks=pack_i32(p for p in known),
        )
        return SlotPromptLogprobs(number, start, columns)


@dataclass
class Collected:
    """Everything the tokenizer process was told of a choice."""

    tokens: list[int] = field(default_factory=list)
    starts: list[SequenceStart] = field(default_factory=list)
    finishes: list[SequenceFinish] = field(default_factory=list)
    logprobs: list[tuple[int, float, int] | None] = field(default_factory=list)
    """(token id, value, rank) of each token's first candidate."""

    @property
    def end(self) -> tuple[list[int], str, int | None]:
        (finish,) = self.finishes
        return self.tokens, finish.reason, finish.stop_token_id


def collect(message: TokenOutputs, into: dict[tuple[int, int], Collected]) -> None:
    """Add the rows of a message, reading it as its consumer would."""
    counts = unpack_i32(message.token_counts)
    keys = list(zip(unpack_u64(message.request_ids), unpack_i32(message.choices), strict=True))
    assert len(set(keys)) == len(keys) == len(counts)
    tokens = list(unpack_i32(message.token_ids))
    assert len(tokens) == sum(counts)
    entries: list[tuple[int, float, int] | None] = [None] * len(tokens)
    if (columns := message.logprobs) is not None:
        ids, values = unpack_i32(columns.token_ids), unpack_f32(columns.values)
        ranks = iter(unpack_i32(columns.ranks))
        start = 0
        for index, count in enumerate(unpack_i32(columns.counts)):
            if count:
                entries[index] = (ids[start], values[start], next(ranks))
                start += count
        assert start == len(ids) == len(values)
    position = 0
    for key, count in zip(keys, counts, strict=True):
        choice = into.setdefault(key, Collected())
        assert not choice.finishes, f"{key} goes on after its end"
        choice.tokens += tokens[position : position + count]
        choice.logprobs += entries[position : position + count]
        position += count
    for sequence_start in message.starts:
        into[keys[sequence_start.row]].starts.append(sequence_start)
    for finish in message.finishes:
        into[keys[finish.row]].finishes.append(finish)


class Engine:
    """A scheduler and its executor; every call checks the books."""

    def __init__(
        self, ready: ExecutorReady, max_steps_in_flight: int = 2, config: SchedulerConfig | None = None
    ) -> None:
        self.ready = ready
        # Steps take next to no time here; what a swap costs whatever its size would always be more.
        costs = SwapCosts(ready.bytes_per_page, ready.swap_bytes_per_second, seconds_per_swap=0.0)
        self.scheduler = Scheduler(ready, config, max_steps_in_flight, swap_costs=costs)
        self.executor = FakeExecutor(ready)
        self.steps: list[SchedulerOutput] = []
        self.in_flight: deque[ModelRunnerOutput] = deque()
        self.choices: dict[tuple[int, int], Collected] = {}
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.refusals: list[RequestRefused] = []
        """Of requests that were queued."""
        self.now_ns = 1000

    @property
    def max_model_len(self) -> int:
        return min(self.ready.max_model_len, self.ready.num_pages * self.ready.page_size)

    def add(self, request: TokenizedRequest) -> RequestRefused | None:
        refused = self.scheduler.add_request(request, self._tick())
        self._take(self.scheduler.take_outputs(), None)
        return refused

    def abort(self, request_id: int, choice: int = -1, reason: str = "abort") -> None:
        self.scheduler.abort(request_id, choice, "stop" if reason == "stop" else "abort")
        self._take(self.scheduler.take_outputs(), None)

    def schedule(self) -> SchedulerOutput | None:
        """Plan a step and have it computed; its result waits for ``deliver``."""
        step = self.scheduler.schedule(self._tick())
        self.refusals += self.scheduler.take_refusals()
        if step is not None:
            step = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=SchedulerOutput)
            self.steps.append(step)
            self.in_flight.append(self.executor.execute(step))
        self._check()
        return step

    def deliver(self) -> bool:
        """Hand the scheduler the oldest result; False if there is none."""
        if not self.in_flight:
            return False
        result = self.scheduler.update_from_output(self.in_flight.popleft(), self._tick())
        self._take(result.outputs, result.times)
        return True

    def run(self) -> None:
        """Until nothing is left, as far ahead as allowed."""
        while True:
            while self.schedule() is not None:
                pass
            if not self.deliver():
                break
        assert not self.scheduler.has_work, f"stuck: {self.scheduler.stats()}"

    def check_empty(self) -> None:
        """Nothing is held any more."""
        assert not self.in_flight
        stats = self.scheduler.stats()
        assert stats.num_free_pages == stats.num_pages == self.ready.num_pages
        assert (stats.num_swapped_pages, stats.num_host_pages) == (0, self.ready.num_host_pages)
        assert (stats.swapped_out_pages, stats.swapped_in_pages) == (self.executor.pages_out, self.executor.pages_in)
        assert stats.swapped_in_tokens == self.executor.tokens_in
        assert stats.num_computed_tokens == self.executor.computed_tokens
        assert (stats.num_running, stats.num_waiting, self.scheduler.num_requests) == (0, 0, 0)
        assert self.scheduler.num_free_slots == self.ready.max_num_seqs

    def check_alone(self, request: TokenizedRequest) -> None:
        """Every choice of the request yielded what it yields alone."""
        for choice in range(request.n):
            assert self.choices[request.request_id, choice].end == run_alone(request, choice, self.max_model_len)
            assert len(self.choices[request.request_id, choice].starts) == 1

    def _tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def _take(self, outputs: OutputBatch, times: StepTimes | None) -> None:
        message = pack_token_outputs(outputs, times, self.scheduler.stats(), self.now_ns)
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=TokenOutputs)
        collect(message, self.choices)
        self.prompt_logprobs += message.prompt_logprobs
        self._check()

    def _check(self) -> None:
        assert self.scheduler.check_integrity() == []
