"""Steps of a model on a device: ``SchedulerOutput`` in, ``ModelRunnerOutput`` out, the device never waiting for either.

    submit    the host's books -> words to write, inputs of chunks -> launches -> results copied to the host
    collect   waits for the oldest step's event -> its tokens

``submit`` needs no result of an earlier step: positions, last tokens, lengths and penalties are the device's own
(``device_state``), and whoever draws a token advances there. The host knows how many tokens there are, not which.
A sequence whose logits failed does not advance on the device; what was planned for it meanwhile computes its last token
again and is thrown away.

Like ``model_runner.ModelRunner`` it decides nothing and knows no request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ringserve.engine.gpu.chunk_layout import ChunkLayout
from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.device_state import DeviceState, StateWidths, rounded_width
from ringserve.engine.gpu.device_step import DeviceStep, StepSizes
from ringserve.engine.gpu.graphs import bucket_of, graph_buckets, warm_up_tokens
from ringserve.engine.gpu.sequence_writes import SlotValues
from ringserve.engine.gpu.step_buffers import BufferPool, StepBuffers
from ringserve.engine.gpu.step_inputs import DeviceModel
from ringserve.engine.gpu.step_plan import StepPlan, pack_chunks, plan_step
from ringserve.engine.gpu.step_results import HostLogprobs, logprob_words
from ringserve.engine.sampler import NO_FINITE_LOGIT
from ringserve.engine.slot_table import SlotTable
from ringserve.messages import (
    LogprobColumns,
    ModelRunnerOutput,
    NewSequence,
    SchedulerOutput,
    SlotPromptLogprobs,
    pack_i32,
)

_Words = NDArray[np.int32]


@dataclass(frozen=True)
class RunnerLimits:
    """What the scheduler keeps to."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    page_size: int
    vocab_size: int

    @property
    def sizes(self) -> StepSizes:
        """Of the device's arrays."""
        return StepSizes(
            num_slots=self.max_num_seqs,
            num_rows=self.max_num_seqs,
            max_pages=-(-self.max_model_len // self.page_size),
            page_size=self.page_size,
            max_tokens=self.max_num_batched_tokens,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True)
class _Flight:
    """A step that was submitted."""

    step_id: int
    received_ns: int
    started_ns: int
    buffers: StepBuffers
    words: torch.Tensor
    """Its results: tokens, then the rows' log probabilities, then the prompts'."""
    plan: StepPlan
    slots: list[int]
    """Of the rows that draw, in the device's order."""
    tenants: list[int]
    """Which sequence had each of these slots."""
    ks: list[int]
    """Log probabilities asked for by each."""
    width: int
    """Of a row of log probabilities."""
    prompt_width: int


class DeviceRunner:
    """The slots, and the steps under way."""

    max_in_flight = 2
    """One is computed while the next one is planned and launched."""

    def __init__(
        self,
        model: DeviceModel,
        device: Device,
        limits: RunnerLimits,
        eos_token_ids: Sequence[int],
        *,
        enforce_eager: bool = False,
        widths: StateWidths | None = None,
    ) -> None:
        self._device = device
        self._limits = limits
        self._sizes = limits.sizes
        self._eos_token_ids = tuple(eos_token_ids)
        self._enforce_eager = enforce_eager
        self._state = self._new_state(widths if widths is not None else StateWidths())
        self._step = DeviceStep(model, self._sizes, self._state, device.torch_device)
        self._buckets = graph_buckets(limits.max_num_seqs)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._buffers = BufferPool(device)
        self._flights: deque[_Flight] = deque()
        self._table = SlotTable()
        self._given = np.zeros(limits.max_num_seqs, dtype=np.int64)
        """Tokens of each slot that the scheduler has sent; the host does not know the others."""
        self._tenants = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._num_tenants = 0
        self._failed: set[int] = set()
        """Tenants that nothing can be drawn for."""
        self._row_slots = np.full(self._sizes.num_rows, -1, dtype=np.int32)
        self._row_lengths = np.zeros(self._sizes.num_rows, dtype=np.int32)
        """What the device's rows have, once everything submitted is done."""
        self._last_sent_ns = 0

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not collected."""
        return len(self._flights)

    @property
    def num_graphs(self) -> int:
        """Captured."""
        return len(self._graphs)

    def execute(self, output: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput:
        """Submit a step, and wait for its result; nothing else may be under way."""
        if self._flights:
            raise RuntimeError("other steps are under way")
        self.submit(output, received_ns)
        return self.collect()

    def submit(self, output: SchedulerOutput, received_ns: int = 0) -> None:
        """Launch a step. A message that does not fit the slots' state raises RuntimeError: the two processes
        disagree."""
        started_ns = time.monotonic_ns()
        starting: list[SlotValues] = []
        slots, counts = self._table.apply(output, self._limits.page_size, partial(self._start, starting))
        self._widen(starting)
        pieces = [piece for values in starting for piece in values.writes(self._state)]
        pieces += self._page_writes(slots, np.frombuffer(output.new_page_counts, dtype=np.int32), output.new_pages)
        plan = plan_step(self._table, self._given, slots, counts, self._limits.vocab_size)
        ordered, ordered_counts = slots[plan.order], counts[plan.order]
        drawing = ordered[: plan.num_draws]
        flight = self._launch(output.step_id, received_ns, started_ns, plan, ordered, ordered_counts, pieces, starting)
        self._table.computed[slots] += counts
        self._table.append(drawing, np.zeros(len(drawing), np.int32))  # which tokens, only the device knows
        self._flights.append(flight)

    def is_ready(self) -> bool:
        """Whether ``collect`` would not wait."""
        return bool(self._flights) and self._flights[0].buffers.event.is_done()

    def collect(self) -> ModelRunnerOutput:
        """The oldest step's result; waits for it. Raises what the device reports where it has failed, IndexError where
        no step is under way."""
        flight = self._flights[0]
        flight.buffers.event.synchronize()
        self._flights.popleft()
        slots, token_ids, logprobs, failed = self._tokens(flight)
        prompt_logprobs = self._prompt_logprobs(flight)
        self._buffers.give_back(flight.buffers)
        sent_ns = time.monotonic_ns()
        # A step begins where the device has nothing older to do.
        started_ns, self._last_sent_ns = max(flight.started_ns, self._last_sent_ns), sent_ns
        return ModelRunnerOutput(
            step_id=flight.step_id,
            slots=pack_i32(slots),
            token_ids=pack_i32(token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            received_ns=flight.received_ns,
            started_ns=started_ns,
            sent_ns=sent_ns,
            failed_slots=failed,
        )

    def warm_up(self, on_progress: Callable[[float], None] = lambda _part: None) -> None:
        """Capture every bucket, the largest first, and compile what steps with chunks need. Touches no page but the
        reserved one, and no slot. Nothing may be under way, and nobody in a slot."""
        chunk_tokens = warm_up_tokens(self._limits.max_num_batched_tokens)
        total = len(self._buckets) + len(chunk_tokens)
        self._set_padding()
        for done, bucket in enumerate(reversed(self._buckets)):
            if self._enforce_eager:
                self._device.submit(partial(self._run, partial(self._step.decode, bucket)))
            else:
                self._graph(bucket)
            on_progress(done / total)
        for done, count in enumerate(chunk_tokens):
            self._device.submit(partial(self._run, partial(self._step.warm_up_chunks, count)))
            on_progress((len(self._buckets) + done) / total)
        self._device.synchronize()
        self._set_padding()

    def close(self) -> None:
        """Nothing may be submitted afterwards; steps under way are forgotten."""
        self._flights.clear()
        self._graphs.clear()

    # ---------------------------------------------------------------------------------------------- the host's books

    def _start(self, starting: list[SlotValues], new: NewSequence) -> None:
        self._num_tenants += 1
        self._tenants[new.slot] = self._num_tenants
        self._given[new.slot] = self._table.length[new.slot]
        starting.append(SlotValues.of(new, self._eos_token_ids, self._limits.vocab_size))

    def _page_writes(self, slots: _Words, page_counts: _Words, pages: bytes) -> list[tuple[_Words, _Words]]:
        rows = np.flatnonzero(page_counts)
        if not len(rows):
            return []
        ends = self._table.num_pages[slots[rows]]
        if int(ends.max()) > self._sizes.max_pages:
            raise RuntimeError(f"a block table of {ends.max()} pages; there is room for {self._sizes.max_pages}")
        counts = page_counts[rows].astype(np.int64)
        # Position of each page: from its row's first new one on.
        columns = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        columns += np.repeat(ends - counts, counts)
        addresses = self._state.addresses("block_tables", np.repeat(slots[rows], counts).astype(np.int64), columns)
        return [(addresses, np.frombuffer(pages, dtype=np.int32))]

    # ------------------------------------------------------------------------------------------------------ launching

    def _launch(
        self,
        step_id: int,
        received_ns: int,
        started_ns: int,
        plan: StepPlan,
        slots: _Words,
        counts: _Words,
        pieces: list[tuple[_Words, _Words]],
        starting: list[SlotValues],
    ) -> _Flight:
        ks = [min(self._table.sampling[slot].logprobs, self._limits.vocab_size) for slot in slots[: plan.num_draws]]
        width, prompt_width = 1 + self._state.widths.logprobs, 1 + rounded_width(max(plan.prompt_ks, default=0))
        cleared = np.array([values.slot for values in starting if values.counts_tokens], dtype=np.int32)
        body: Callable[[torch.Tensor], None] = _nothing
        layout, chunk_words = None, np.empty(0, np.int32)
        if len(slots) > plan.num_decodes:
            layout, chunk_words = pack_chunks(self._table, plan, slots, counts, self._limits.page_size)
            if layout.num_tokens > self._limits.max_num_batched_tokens:
                raise RuntimeError(
                    f"a step of {layout.num_tokens} tokens; there is room for {self._limits.max_num_batched_tokens}"
                )
            row_lengths = (self._table.computed[slots] + counts).astype(np.int32)
            row_lengths[: plan.num_decodes] = 0
            pieces = [*pieces, *self._row_writes(slots, row_lengths)]
        elif len(slots):
            graph = None
            rows = len(slots)
            if not self._enforce_eager:
                rows = bucket_of(self._buckets, rows)
                graph = self._graph(rows)
            padded = np.full(rows, -1, dtype=np.int32)
            padded[: len(slots)] = slots
            pieces = [*pieces, *self._row_writes(padded, np.zeros(rows, np.int32))]
            body = partial(_call, graph if graph is not None else partial(self._step.decode, rows))
        num_logprobs = plan.num_draws if any(k >= 0 for k in ks) else 0
        num_prompt = 0 if layout is None or not layout.num_prompt_logits else layout.num_wanted
        buffers = self._buffers.take()
        writes = _joined(pieces)
        inputs = buffers.inputs(writes.size + len(cleared) + len(chunk_words))
        np.concatenate([writes.reshape(-1), cleared, chunk_words], out=inputs.numpy())
        results = buffers.results(
            plan.num_draws + logprob_words(num_logprobs, width) + logprob_words(num_prompt, prompt_width)
        )
        if layout is not None:
            body = partial(self._run_chunks, layout, prompt_width - 1, results)
        work = partial(self._work, inputs, len(writes), len(cleared), body, results, plan.num_draws, num_logprobs)
        self._device.submit(partial(self._run, work))
        buffers.event.record()
        return _Flight(
            step_id,
            received_ns,
            started_ns,
            buffers,
            results,
            plan,
            slots[: plan.num_draws].tolist(),
            self._tenants[slots[: plan.num_draws]].tolist(),
            ks,
            width if num_logprobs else 0,
            prompt_width if num_prompt else 0,
        )

    def _row_writes(self, slots: _Words, lengths: _Words) -> list[tuple[_Words, _Words]]:
        """What differs from what the rows have."""
        pieces = []
        for name, known, wanted in (
            ("row_slots", self._row_slots, slots),
            ("row_lengths", self._row_lengths, lengths),
        ):
            changed = np.flatnonzero(known[: len(wanted)] != wanted)
            if len(changed):
                known[changed] = wanted[changed]
                pieces.append((self._state.addresses(name, changed), wanted[changed]))
        return pieces

    def _work(
        self,
        inputs: torch.Tensor,
        num_writes: int,
        num_cleared: int,
        body: Callable[[torch.Tensor], None],
        results: torch.Tensor,
        num_draws: int,
        num_logprobs: int,
    ) -> None:
        """Everything of a step that the device does, in this order."""
        if len(inputs):
            words = torch.empty(len(inputs), dtype=torch.int32, device=self._device.torch_device)
            words.copy_(inputs, non_blocking=True)
            writes, cleared, chunks = torch.split(
                words, [2 * num_writes, num_cleared, len(words) - 2 * num_writes - num_cleared]
            )
            self._step.write(writes.view(-1, 2), cleared)
        else:
            chunks = self._step.tokens[:0]
        body(chunks)
        if num_draws:
            results[:num_draws].copy_(self._step.tokens[:num_draws], non_blocking=True)
        if num_logprobs:
            self._step.logprobs.first(num_logprobs).copy_to(results[num_draws:])

    def _run_chunks(self, layout: ChunkLayout, most: int, results: torch.Tensor, words: torch.Tensor) -> None:
        logprobs = self._step.run_chunks(layout, words, most)
        if logprobs is not None:  # they come last
            logprobs.copy_to(results[len(results) - logprob_words(layout.num_wanted, 1 + most) :])

    def _run(self, work: Callable[[], None]) -> None:
        with torch.no_grad():
            work()

    # --------------------------------------------------------------------------------------------- graphs and widths

    def _graph(self, bucket: int) -> Callable[[], None]:
        """Captured when it is first asked for, which is at the start but for those that a wider state made useless."""
        graph = self._graphs.get(bucket)
        if graph is None:
            self._set_padding()
            with torch.no_grad():
                graph = self._graphs[bucket] = self._device.capture(partial(self._step.decode, bucket))
        return graph

    def _set_padding(self) -> None:
        """No row has a slot: what runs now leaves no trace."""
        self._row_slots[:] = -1
        self._row_lengths[:] = 0
        self._device.submit(partial(self._run, self._step.pad_rows))

    def _new_state(self, widths: StateWidths) -> DeviceState:
        sizes = self._sizes
        return DeviceState(
            sizes.num_slots, sizes.num_rows, sizes.max_pages, sizes.vocab_size, widths, self._device.torch_device
        )

    def _widen(self, starting: list[SlotValues]) -> None:
        """Make room for what these ask for. Rare: all columns move, and graphs are captured anew as they are needed."""
        widths = self._state.widths
        for values in starting:
            widths = values.widths(widths)
        if widths is not self._state.widths:
            self._state = self._new_state(widths)
            self._device.submit(partial(self._run, partial(self._step.use, self._state)))
            self._graphs.clear()

    # -------------------------------------------------------------------------------------------------------- results

    def _tokens(
        self, flight: _Flight
    ) -> tuple[list[int], list[int], LogprobColumns | None, tuple[tuple[int, str], ...]]:
        tokens = flight.words[: flight.plan.num_draws].tolist()
        rows = flight.plan.results
        if self._failed or min(tokens, default=0) < 0:
            rows = [row for row in rows if flight.tenants[row] not in self._failed]
            gone = [row for row in rows if tokens[row] < 0]
            self._failed.update(flight.tenants[row] for row in gone)
            failed = tuple([(flight.slots[row], NO_FINITE_LOGIT) for row in gone])
            rows = [row for row in rows if tokens[row] >= 0]
            if not self._flights:  # those that have left can have no row any more
                self._failed.intersection_update(self._tenants.tolist())
        else:
            failed = ()
        logprobs = None
        if any(flight.ks[row] >= 0 for row in rows):
            words = flight.words[flight.plan.num_draws :]
            found = HostLogprobs.read(words, flight.plan.num_draws, flight.width)
            logprobs = found.columns(rows, [flight.ks[row] for row in rows])
        return [flight.slots[row] for row in rows], [tokens[row] for row in rows], logprobs, failed

    def _prompt_logprobs(self, flight: _Flight) -> tuple[SlotPromptLogprobs, ...]:
        if not flight.plan.prompts:
            return ()
        found = None
        if flight.prompt_width:
            rows = flight.plan.num_draws + len(flight.plan.wanted_prompt)
            words = flight.words[len(flight.words) - logprob_words(rows, flight.prompt_width) :]
            found = HostLogprobs.read(words, rows, flight.prompt_width)
        results = [part.result(found) for part in flight.plan.prompts]
        return tuple([result for result in results if result is not None])


def _joined(pieces: Sequence[tuple[_Words, _Words]]) -> _Words:
    """[writes, 2]."""
    if not pieces:
        return np.empty((0, 2), dtype=np.int32)
    return np.stack([np.concatenate([piece[i] for piece in pieces]) for i in (0, 1)], axis=1)


def _nothing(_words: torch.Tensor) -> None:
    """A step without rows."""


def _call(work: Callable[[], None], _words: torch.Tensor) -> None:
    work()
