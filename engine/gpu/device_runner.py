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

from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.device_state import DeviceState, StateWidths, rounded_width
from ringserve.engine.gpu.device_step import DeviceStep, StepSizes
from ringserve.engine.gpu.flight import Flight
from ringserve.engine.gpu.graphs import bucket_of, graph_buckets, warm_up_tokens
from ringserve.engine.gpu.row_mirror import RowMirror
from ringserve.engine.gpu.sequence_writes import SlotValues
from ringserve.engine.gpu.slot_books import SlotBooks
from ringserve.engine.gpu.step_buffers import BufferPool, StepBuffers
from ringserve.engine.gpu.step_inputs import DeviceModel
from ringserve.engine.gpu.step_plan import StepPlan, pack_chunks, plan_step
from ringserve.engine.gpu.step_results import logprob_words
from ringserve.engine.gpu.step_split import split_step
from ringserve.engine.gpu.step_work import StepWork
from ringserve.engine.page_swaps import apply_swaps
from ringserve.engine.sampler import NO_FINITE_LOGIT
from ringserve.engine.swap_pool import SwapPool
from ringserve.messages.columns import pack_i32
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput

_Words = NDArray[np.int32]


@dataclass(frozen=True)
class RunnerLimits:
    """What the scheduler keeps to."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    page_size: int
    vocab_size: int
    max_prompt_logits: int = 256
    """Tokens of prompts whose logits are there at once, where log probabilities of prompts are asked for."""

    @property
    def sizes(self) -> StepSizes:
        """Of the device's arrays."""
        return StepSizes(
            num_slots=self.max_num_seqs,
            num_rows=self.max_num_seqs,
            max_len=self.max_model_len,
            page_size=self.page_size,
            max_tokens=self.max_num_batched_tokens,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True)
class _Step:
    """A step under way."""

    step_id: int
    received_ns: int
    started_ns: int
    flights: list[Flight]
    """Its parts: usually one."""


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
        swap_pool: SwapPool | None = None,
    ) -> None:
        """``swap_pool``: of the model's pages, where sequences may be swapped."""
        self._device = device
        self._limits = limits
        self._sizes = limits.sizes
        self._enforce_eager = enforce_eager
        self._swap_pool = swap_pool
        self._state = self._new_state(widths if widths is not None else StateWidths())
        self._step = DeviceStep(model, self._sizes, self._state, device.torch_device)
        self._buckets = graph_buckets(limits.max_num_seqs)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._buffers = BufferPool(device)
        self._steps: deque[_Step] = deque()
        self._books = SlotBooks(self._sizes, eos_token_ids)
        self._failed: set[int] = set()
        """Tenants that nothing can be drawn for."""
        self._rows = RowMirror(self._sizes.num_rows)
        self._last_sent_ns = 0

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not collected."""
        return len(self._steps)

    @property
    def num_graphs(self) -> int:
        """Captured."""
        return len(self._graphs)

    def execute(self, output: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput:
        """Submit a step, and wait for its result; nothing else may be under way."""
        if self._steps:
            raise RuntimeError("other steps are under way")
        self.submit(output, received_ns)
        return self.collect()

    def submit(self, output: SchedulerOutput, received_ns: int = 0) -> None:
        """Launch a step. A message that does not fit the slots' state raises RuntimeError: the two processes
        disagree."""
        started_ns = time.monotonic_ns()
        slots, counts, starting = self._books.apply(output)
        self._widen(starting)
        parts = split_step(self._books.table, slots, counts, self._limits.max_prompt_logits)
        writes = [piece for values in starting for piece in values.writes(self._state)]
        writes += self._books.page_writes(output, self._state)
        cleared = np.array([values.slot for values in starting if values.counts_tokens], dtype=np.int32)
        if output.swaps is not None:
            self._submit(partial(apply_swaps, self._swap_pool, output))
        flights = []
        for part_slots, part_counts in parts:
            flights.append(self._submit_part(part_slots, part_counts, writes, cleared))
            writes, cleared = [], cleared[:0]
        self._steps.append(_Step(output.step_id, received_ns, started_ns, flights))

    def _submit_part(
        self, slots: _Words, counts: _Words, writes: list[tuple[_Words, _Words]], cleared: _Words
    ) -> Flight:
        plan = plan_step(self._books.table, slots, counts, self._limits.vocab_size)
        slots_there, counts_there = slots[plan.order], counts[plan.order]
        buffers = self._buffers.take()
        work = self._work(plan, slots_there, counts_there, writes, cleared, buffers)
        self._submit(partial(self._step.run, work))
        buffers.event.record()
        drawing = slots_there[: plan.num_draws]
        self._books.advance(slots, counts, drawing)
        return Flight(
            buffers=buffers,
            words=work.results,
            plan=plan,
            slots=drawing.tolist(),
            tenants=self._books.tenants[drawing].tolist(),
            ks=self._books.ks[drawing].tolist(),
            width=1 + self._state.widths.logprobs if work.num_logprobs else 0,
            prompt_width=1 + work.prompt_most if plan.wanted_prompt else 0,
        )

    def is_ready(self) -> bool:
        """Whether ``collect`` would not wait."""
        return bool(self._steps) and self._steps[0].flights[-1].buffers.event.is_done()

    def collect(self) -> ModelRunnerOutput:
        """The oldest step's result; waits for it. Raises what the device reports where it has failed, IndexError where
        no step is under way."""
        step = self._steps[0]
        last = step.flights[-1]  # only in the last part a token is drawn
        last.buffers.event.synchronize()
        self._steps.popleft()
        rows, failed = self._rows_drawn(last)
        tokens, logprobs = last.tokens, last.logprobs(rows)
        prompt_logprobs = [part for flight in step.flights for part in flight.prompt_logprobs()]
        for flight in step.flights:
            self._buffers.give_back(flight.buffers)
        sent_ns = time.monotonic_ns()
        # A step begins where the device has nothing older to do.
        started_ns, self._last_sent_ns = max(step.started_ns, self._last_sent_ns), sent_ns
        return ModelRunnerOutput(
            step_id=step.step_id,
            slots=pack_i32(last.slots[row] for row in rows),
            token_ids=pack_i32(tokens[row] for row in rows),
            logprobs=logprobs,
            prompt_logprobs=tuple(prompt_logprobs),
            received_ns=step.received_ns,
            started_ns=started_ns,
            sent_ns=sent_ns,
            failed_slots=failed,
        )

    def warm_up(self, on_progress: Callable[[float], None] = lambda _part: None) -> None:
        """Capture every bucket, the largest first, and compile what steps with chunks need. Touches no page but the
        reserved one, and no slot. Nothing may be under way, and nobody in a slot."""
        chunk_tokens = warm_up_tokens(self._limits.max_num_batched_tokens)
        total = len(self._buckets) + len(chunk_tokens)
        (address,), (word,) = self._state.writes("lengths", 0, 0)
        self._submit(partial(self._step.warm_up_writes, int(address), int(word)))
        self._set_padding()
        for done, bucket in enumerate(reversed(self._buckets)):
            if self._enforce_eager:
                self._submit(partial(self._step.decode, bucket))
            else:
                self._graph(bucket)
            on_progress(done / total)
        for done, count in enumerate(chunk_tokens):
            self._submit(partial(self._step.warm_up_chunks, count, self._limits.max_prompt_logits))
            on_progress((len(self._buckets) + done) / total)
        self._device.synchronize()
        self._set_padding()

    def close(self) -> None:
        """Nothing may be submitted afterwards; steps under way are waited for and forgotten."""
        if self._steps:
            self._device.synchronize()  # a graph that is running must not be given up
        self._steps.clear()
        self._graphs.clear()

    # ------------------------------------------------------------------------------------------------------ launching

    def _work(
        self,
        plan: StepPlan,
        slots: _Words,
        counts: _Words,
        pieces: list[tuple[_Words, _Words]],
        cleared: _Words,
        buffers: StepBuffers,
    ) -> StepWork:
        """What the device is to do; slots and counts are in its order. Fills the buffers."""
        layout, decode, chunks = None, None, np.empty(0, np.int32)
        if len(slots) > plan.num_decodes:
            layout, chunks = pack_chunks(self._books.table, plan, slots, counts, self._limits.page_size)
            most = self._limits.max_num_batched_tokens
            if layout.num_tokens > most:
                raise RuntimeError(f"a step of {layout.num_tokens} tokens; there is room for {most}")
            row_lengths = (self._books.table.computed[slots] + counts).astype(np.int32)
            row_lengths[: plan.num_decodes] = 0
            pieces = [*pieces, *self._rows.writes(self._state, slots, row_lengths)]
        elif len(slots):
            rows = len(slots) if self._enforce_eager else bucket_of(self._buckets, len(slots))
            # Before the rows are written: a graph that has to be captured first makes padding of them.
            decode = partial(self._step.decode, rows) if self._enforce_eager else self._graph(rows)
            padded = np.full(rows, -1, dtype=np.int32)
            padded[: len(slots)] = slots
            pieces = [*pieces, *self._rows.writes(self._state, padded, np.zeros(rows, np.int32))]
        writes = _joined(pieces)
        inputs = buffers.inputs(writes.size + len(cleared) + len(chunks))
        np.concatenate([writes.reshape(-1), cleared, chunks], out=inputs.numpy())

        num_logprobs = plan.num_draws if (self._books.ks[slots[: plan.num_draws]] >= 0).any() else 0
        num_prompt = layout.num_wanted if layout is not None and layout.num_prompt_logits else 0
        prompt_most = rounded_width(max(plan.prompt_ks, default=0))
        num_results = plan.num_draws + logprob_words(num_logprobs, 1 + self._state.widths.logprobs)
        num_results += logprob_words(num_prompt, 1 + prompt_most)
        return StepWork(
            inputs=inputs,
            num_writes=len(writes),
            num_cleared=len(cleared),
            layout=layout,
            decode=decode,
            results=buffers.results(num_results),
            num_draws=plan.num_draws,
            num_logprobs=num_logprobs,
            prompt_most=prompt_most,
        )

    def _submit(self, work: Callable[[], None]) -> None:
        self._device.submit(partial(_without_gradients, work))

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
        self._rows.clear()
        self._submit(self._step.pad_rows)

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
            self._submit(partial(self._step.use, self._state))
            self._device.synchronize()  # before a graph that may be running is given up
            self._graphs.clear()

    # -------------------------------------------------------------------------------------------------------- results

    def _rows_drawn(self, flight: Flight) -> tuple[list[int], tuple[tuple[int, str], ...]]:
        """The flight's rows that have a token, in the step's order; slots that failed, with the reason."""
        rows, tokens = flight.plan.results, flight.tokens
        if not self._failed and min(tokens, default=0) >= 0:
            return rows, ()
        rows = [row for row in rows if flight.tenants[row] not in self._failed]
        gone = [row for row in rows if tokens[row] < 0]
        self._failed.update(flight.tenants[row] for row in gone)
        if not self._steps:  # those that have left can have no row any more
            self._failed.intersection_update(self._books.tenants.tolist())
        failed = tuple([(flight.slots[row], NO_FINITE_LOGIT) for row in gone])
        return [row for row in rows if tokens[row] >= 0], failed


def _joined(pieces: Sequence[tuple[_Words, _Words]]) -> _Words:
    """[writes, 2]."""
    if not pieces:
        return np.empty((0, 2), dtype=np.int32)
    return np.stack([np.concatenate([piece[i] for piece in pieces]) for i in (0, 1)], axis=1)


def _without_gradients(work: Callable[[], None]) -> None:
    with torch.no_grad():
        work()
