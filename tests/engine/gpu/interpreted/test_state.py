"""What lies on the device: columns, words, and the rows that a step is made of."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from ringserve.engine.gpu.device_state import DeviceState, StateWidths, rounded_width
from ringserve.engine.gpu.sequence_writes import SlotValues
from ringserve.kernels.gpu.sampler_state import IN_PROMPT, SamplerState
from ringserve.kernels.gpu.step_rows import RowArrays, step_rows
from ringserve.kernels.gpu.write_words import write_words
from ringserve.messages.columns import pack_f32, pack_i32
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import NewSequence

CPU = torch.device("cpu")
VOCAB_SIZE = 50


def state_of(widths: StateWidths | None = None) -> DeviceState:
    return DeviceState(5, 5, 6, VOCAB_SIZE, widths if widths is not None else StateWidths(4, 16, 15), CPU)


def column_of(state: DeviceState, name: str) -> torch.Tensor:
    column: torch.Tensor = getattr(state, name) if hasattr(state, name) else getattr(state.sampler, name)
    return column


NAMES = [field.name for field in fields(SamplerState)] + ["block_tables", "logprob_ks", "row_slots", "row_lengths"]


def test_a_new_state_is_empty() -> None:
    state = state_of()
    expected = SamplerState.allocate(5, VOCAB_SIZE, CPU, count_rows=5, most_ends=4, most_biases=16)
    for field in fields(SamplerState):
        assert torch.equal(getattr(state.sampler, field.name), getattr(expected, field.name)), field.name
    assert column_of(state, "row_slots").tolist() == [-1] * 5
    assert all(column_of(state, name).data_ptr() % 16 == state.words.data_ptr() % 16 for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_write_reaches_its_column_and_no_other(name: str) -> None:
    state = state_of()
    before = {each: column_of(state, each).clone() for each in NAMES}
    column = column_of(state, name)
    values: Any = [7, 8, 9] if column.dim() == 2 else 7
    addresses, words = state.writes(name, 3, values, first=1 if column.dim() == 2 else 0)
    write_words(torch.from_numpy(np.stack([addresses, words], axis=1)), state.words)
    row = before[name][3].clone()
    if column.dim() == 2:
        row[1:4] = torch.tensor(values)
    else:
        row.fill_(7)
    before[name][3] = row
    for each, expected in before.items():
        assert torch.equal(column_of(state, each), expected), each


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 2500])
def test_write_words(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(100, (5000,), dtype=torch.int32, generator=generator)
    addresses = torch.randperm(5000, generator=generator)[:count]
    values = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator).to(torch.int32)
    expected = words.clone()
    expected[addresses] = values
    write_words(torch.stack([addresses.to(torch.int32), values], dim=1).contiguous(), words)
    assert torch.equal(words, expected)


def test_a_wider_state_knows_what_the_narrow_one_knew() -> None:
    narrow = state_of()
    narrow.words.copy_(torch.arange(len(narrow.words), dtype=torch.int32))
    wide = state_of(narrow.widths.grown(ends=9, biases=3, logprobs=40))
    assert wide.widths == StateWidths(16, 16, 47)
    wide.copy_from(narrow)
    for name in NAMES:
        old, new = column_of(narrow, name), column_of(wide, name)
        part = tuple(slice(0, size) for size in old.shape)
        assert torch.equal(new[part].view(torch.uint8), old.contiguous().view(torch.uint8)), name
    assert narrow.widths.grown(4, 16, 15) is narrow.widths


@pytest.mark.parametrize(("needed", "width"), [(0, 15), (15, 15), (16, 31), (31, 31), (32, 47)])
def test_rows_of_log_probabilities_are_aligned(needed: int, width: int) -> None:
    assert rounded_width(needed) == width


def test_a_state_that_has_no_addresses_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        DeviceState(1 << 14, 1, 1, 1 << 18, StateWidths(), torch.device("meta"))


def written(new: NewSequence, eos: tuple[int, ...] = (2,)) -> DeviceState:
    values = SlotValues.of(new, eos, VOCAB_SIZE)
    state = state_of(values.widths(StateWidths(4, 16, 15)))
    pieces = values.writes(state)
    addresses, words = (np.concatenate([piece[i] for piece in pieces]) for i in (0, 1))
    assert len(np.unique(addresses)) == len(addresses)
    write_words(torch.from_numpy(np.stack([addresses, words], axis=1)), state.words)
    return state


def test_a_resumed_sequence_s_state() -> None:
    sampling = SamplingParams(
        seed=(1 << 64) - 2,
        temperature=0.5,
        top_k=99,
        repetition_penalty=1.5,
        frequency_penalty=0.1,
        min_tokens=3,
        stop_token_ids=pack_i32([9, 70]),
        logit_bias_ids=pack_i32([4, 4, 80]),
        logit_bias_values=pack_f32([1.0, 2.0, 3.0]),
        logprobs=2,
    )
    state = written(NewSequence(3, pack_i32([7, 8, 7, 11, 12, 11, 8]), 3, 0, 1, sampling, 9))
    sampler = state.sampler
    assert sampler.seeds[3] == -2
    assert [int(x) for x in (sampler.lengths[3], sampler.last_tokens[3], sampler.choices[3])] == [7, 8, 1]
    assert [x.item() for x in (sampler.temperatures[3], sampler.top_ks[3])] == [0.5, VOCAB_SIZE]
    assert sampler.hide_ends_before[3] == 6
    assert sampler.end_ids[3, : sampler.num_ends[3]].tolist() == [2, 9]
    assert sampler.bias_ids[3, : sampler.num_biases[3]].tolist() == [4]
    assert sampler.bias_values[3, 0] == 2.0
    assert [int(x) for x in (sampler.count_rows[3], state.logprob_ks[3])] == [3, 2]
    counts = sampler.token_counts[3]
    assert {i: int(counts[i]) for i in counts.nonzero()[:, 0].tolist()} == {
        7: IN_PROMPT,
        8: IN_PROMPT + 1,
        11: 2,
        12: 1,
    }


def test_a_plain_sequence_s_state() -> None:
    sampling = SamplingParams(seed=1, min_tokens=2**31 - 1, ignore_eos=True)
    sampler = written(NewSequence(0, pack_i32([7]), 1, 0, 0, sampling, 9)).sampler
    assert [int(x) for x in (sampler.count_rows[0], sampler.num_ends[0], sampler.hide_ends_before[0])] == [-1, 0, 0]
    endless = SamplingParams(seed=1, min_tokens=2**31 - 1)
    assert written(NewSequence(0, pack_i32([7]), 1, 0, 0, endless, 9)).sampler.hide_ends_before[0] == 2**31 - 1


def test_step_rows() -> None:
    """Decoding rows, rows with chunks and padding, in any order; tables of one page to more than a block has."""
    page_size, max_pages = 4, 300
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 4, 5, 1200, 77, 9], dtype=torch.int32)
    last = torch.tensor([11, 12, 13, 14, 15, 16], dtype=torch.int32)
    ks = torch.tensor([-1, 0, 3, -1, 5, 2], dtype=torch.int32)
    table = torch.randint(1, 5000, (6, max_pages), dtype=torch.int32, generator=generator)
    slots = torch.tensor([3, -1, 0, 2, 5, 1, 4], dtype=torch.int32)
    row_lengths = torch.tensor([0, 0, 0, 0, 1000, 0, 7], dtype=torch.int32)
    inputs = torch.full((3, 9), -77, dtype=torch.int32)
    pages = torch.full((8, max_pages), -77, dtype=torch.int32)
    rows = RowArrays(
        inputs[0], inputs[1], inputs[2], torch.full((8,), -77, dtype=torch.int32), pages,
        torch.full((8,), -77, dtype=torch.int32),
    )  # fmt: skip
    step_rows(slots, row_lengths, lengths, last, ks, table, page_size, rows)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert inputs[:, row].tolist() == [0, 0, -1]
            assert [int(x) for x in (rows.seq_lens[row], rows.ks[row], pages[row, 0])] == [0, -1, 0]
            continue
        chunk = int(row_lengths[row])
        length = chunk if chunk else int(lengths[slot])
        used = -(-length // page_size)
        assert [int(x) for x in (rows.seq_lens[row], rows.ks[row])] == [length, ks[slot]]
        assert torch.equal(pages[row, :used], table[slot, :used])
        assert bool((pages[row, used:] == -77).all())
        position = length - 1
        slot_of_token = int(table[slot, position // page_size]) * page_size + position % page_size
        expected = [-77] * 3 if chunk else [int(last[slot]), position, slot_of_token]
        assert inputs[:, row].tolist() == expected
    assert inputs[:, 7:].eq(-77).all()
    assert rows.seq_lens[7] == -77
