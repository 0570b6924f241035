"""What the host and the device promise one another: buffers, buckets, and that nobody waits."""

# torch's dispatch modes are untyped for mypy.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from context_model import Patterns
from device_runners import VOCAB_SIZE, device_runner, limits_of, small_ready
from late_device import LateDevice
from runner_steps import decode_step, first_step
from torch.utils._python_dispatch import TorchDispatchMode

from ringserve.engine.gpu.device import HostDevice
from ringserve.engine.gpu.device_runner import DeviceRunner
from ringserve.engine.gpu.graphs import bucket_of, graph_buckets
from ringserve.engine.gpu.step_buffers import BufferPool, StepBuffers
from ringserve.engine.gpu.step_split import split_step
from ringserve.engine.slot_table import SlotTable
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import NewSequence

PATTERNS = Patterns(VOCAB_SIZE)


def generate_with_many_in_flight(runner: DeviceRunner, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Everything is submitted before anything is collected."""
    tokens: list[list[int]] = [[] for _ in prompts]
    runner.submit(first_step(prompts))
    for step in range(1, steps):
        slots = [slot for slot in range(len(prompts)) if slot < len(prompts) - step % 2]
        runner.submit(decode_step(step, slots))
    for step in range(steps):
        output = runner.collect()
        assert output.step_id == step
        for slot, token in zip(unpack_i32(output.slots), unpack_i32(output.token_ids), strict=True):
            tokens[slot].append(token)
    return tokens


PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12]]


def test_steps_do_not_share_buffers() -> None:
    """Seven steps under way on a device that has done none of them yet."""
    tokens = generate_with_many_in_flight(device_runner(small_ready(), PATTERNS), PROMPTS, 7)
    assert tokens[0] == PATTERNS.greedy(PROMPTS[0], 7)
    assert tokens[1] == PATTERNS.greedy(PROMPTS[1], 7)
    assert tokens[2] == PATTERNS.greedy(PROMPTS[2], 4)


def test_a_buffer_that_is_used_too_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of these tests catches it: given back as soon as it is taken, a pair is overwritten before it is
    copied."""
    take = BufferPool.take

    def take_and_give_back(pool: BufferPool) -> StepBuffers:
        buffers = take(pool)
        pool.give_back(buffers)
        return buffers

    monkeypatch.setattr(BufferPool, "take", take_and_give_back)
    runner = device_runner(small_ready(), PATTERNS)
    wrong: list[list[int]] | None = None
    try:
        wrong = generate_with_many_in_flight(runner, PROMPTS, 7)
    except (AssertionError, IndexError, RuntimeError):
        return  # the model met what is not there
    assert wrong[0] != PATTERNS.greedy(PROMPTS[0], 7)


def test_results_that_nobody_waited_for_are_not_there() -> None:
    device = LateDevice()
    runner = device_runner(small_ready(), PATTERNS, device)
    runner.submit(first_step(PROMPTS))
    assert not runner.is_ready()
    device.synchronize()
    assert runner.is_ready()
    assert list(unpack_i32(runner.collect().token_ids)) == [PATTERNS.greedy(p, 1)[0] for p in PROMPTS]
    assert not runner.is_ready()
    with pytest.raises(IndexError):
        runner.collect()


@pytest.mark.parametrize("number", [1, 2, 3, 4, 8, 15, 16, 24, 33])
def test_buckets(number: int) -> None:
    buckets = graph_buckets(number)
    assert buckets[0] == 1
    assert buckets[-1] == number
    assert all(b in (1, 2, 4, number) or b % 8 == 0 for b in buckets)
    for rows in range(1, number + 1):
        assert bucket_of(buckets, rows) == min(b for b in buckets if b >= rows)


def test_graphs_equal_eager_steps_in_every_bucket() -> None:
    """For every number of rows, with lengths and owners of rows that change from step to step."""
    ready = small_ready(num_pages=80, max_num_seqs=17, max_tokens=64)
    prompts = [[3 + i, 4, 5 + i][: 1 + i % 3] for i in range(17)]
    found = []
    for enforce_eager in (False, True):
        runner = device_runner(ready, PATTERNS, HostDevice(), enforce_eager=enforce_eager)
        captured = runner.num_graphs
        assert captured == (0 if enforce_eager else len(graph_buckets(17)))
        tokens = [unpack_i32(runner.execute(first_step(prompts, temperature=0.8, seed=4)).token_ids).tolist()]
        for step, rows in enumerate((17, 1, 16, 3, 9, 2, 8, 5, 4), 1):
            slots = [(7 * step + 5 * i) % 17 for i in range(rows)]
            tokens.append(unpack_i32(runner.execute(decode_step(step, slots)).token_ids).tolist())
        assert runner.num_graphs == captured
        found.append(tokens)
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [17, 17, 1, 16, 3, 9, 2, 8, 5, 4]


WAITING = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero")
"""Operations that make the host wait for a device, or that have a shape which only the device knows."""


class NobodyWaits(TorchDispatchMode):
    """Fails where the host looks at a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in WAITING, name
        if name == "aten::index":
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask as an index"
        return func(*args, **(kwargs or {}))


class PlainModel:
    """Logits of the token alone, by operations that wait for nothing."""

    def __init__(self) -> None:
        self._rows = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def forward(self, inputs: Any) -> torch.Tensor:
        logits = self._rows[inputs.token_ids.long()]
        return logits if inputs.wanted is None else logits[inputs.wanted]


def test_the_host_waits_for_nothing_while_it_submits() -> None:
    """Steps with chunks, penalties, all kinds of log probabilities, and graphs: launches alone."""
    ready = small_ready()
    runner = DeviceRunner(PlainModel(), HostDevice(), limits_of(ready), [2])
    runner.warm_up()
    step = first_step(PROMPTS, temperature=0.9, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1, min_tokens=3)
    with NobodyWaits():
        runner.submit(step)
        runner.submit(decode_step(1, [2, 0]))
    output = runner.collect()
    assert output.logprobs is not None
    assert [part.slot for part in output.prompt_logprobs] == [0, 1, 2]
    assert len(unpack_i32(runner.collect().slots)) == 2


class _Positions:
    """Remembers where tokens were said to be."""

    def __init__(self) -> None:
        self.highest = 0

    def forward(self, inputs: Any) -> torch.Tensor:
        self.highest = max(self.highest, int(inputs.positions.max()))
        assert int(inputs.positions.min()) >= 0
        return torch.zeros(len(inputs.token_ids if inputs.wanted is None else inputs.wanted), VOCAB_SIZE)


@pytest.mark.parametrize("max_len", [13, 16, 63])
def test_the_warm_up_stays_inside_the_longest_sequence(max_len: int) -> None:
    """Models have angles and embeddings for so many positions; a GPU does not check what it reads behind them."""
    model = _Positions()
    DeviceRunner(model, HostDevice(), limits_of(small_ready(max_len=max_len, max_tokens=70)), [2]).warm_up()
    assert model.highest == max_len - 1


@pytest.mark.parametrize("seed", range(20))
def test_a_step_in_parts_is_the_same_step(seed: int) -> None:
    """Each part has no more tokens that ask than allowed; together they are the step."""
    random = Random(seed)
    table = SlotTable()
    count = random.randint(1, 5)
    for slot in range(count):
        sampling = SamplingParams(seed=0, prompt_logprobs=random.choice([-1, 0, 3]))
        table.start(
            NewSequence(slot, pack_i32(range(40)), 40, random.randint(0, 20), random.choice([0, 0, 1]), sampling, 5)
        )
    slots = np.array(random.sample(range(count), count), dtype=np.int32)
    counts = np.array([random.choice([1, 20, random.randint(1, 20)]) for _ in slots], dtype=np.int32)
    most = random.choice([5, 7, 100])
    parts = split_step(table, slots, counts, most)
    total = dict.fromkeys(range(count), 0)
    for part_slots, part_counts in parts:
        for slot, part in zip(part_slots.tolist(), part_counts.tolist(), strict=True):
            assert part >= 1
            total[slot] += part
        asking = [int(n) for slot, n in zip(part_slots, part_counts, strict=True) if table.wants_prompt[slot]]
        assert sum(asking) <= max(most, len(asking))
    assert total == dict(zip(slots.tolist(), counts.tolist(), strict=True))
    assert parts[-1][0].tolist() == slots.tolist()
    if sum(int(n) for slot, n in zip(slots, counts, strict=True) if table.wants_prompt[slot]) <= most:
        assert len(parts) == 1
    assert len(split_step(table, slots[:0], counts[:0], most)) == 1
