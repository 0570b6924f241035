"""An executor without a model, for the scheduler's tests.

It reads the token history back from simulated pages: a page that is reused too early, a block table that is wrong or a
token lost in a recompute changes every token after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulated_tokens import draw, position_logprob

from ringserve.messages.columns import pack_f32, pack_i32, unpack_i32
from ringserve.messages.logprobs import LogprobColumns, SlotPromptLogprobs
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.steps import ModelRunnerOutput, NewSequence, PageSwaps, SchedulerOutput


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
