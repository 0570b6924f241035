"""Log probabilities on their way through the scheduler."""

from __future__ import annotations

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine
from simulated_tokens import position_logprob

from ringserve.messages.columns import pack_i32, unpack_f32, unpack_i32
from ringserve.messages.logprobs import LogprobColumns
from ringserve.messages.steps import ModelRunnerOutput


def test_logprobs_follow_their_tokens() -> None:
    engine = Engine(executor_ready())
    without, with_two = make_request(1, 6, 9), make_request(2, 5, 9, logprobs=2)
    engine.add(without)
    engine.add(with_two)
    engine.run()
    assert engine.choices[1, 0].logprobs == [None] * 9
    history = list(unpack_i32(with_two.prompt_token_ids))
    for token, entry in zip(engine.choices[2, 0].tokens, engine.choices[2, 0].logprobs, strict=True):
        history.append(token)
        assert entry == (token, position_logprob(history), len(history))


@pytest.mark.parametrize("page_size", [16, 64])
def test_prompt_logprobs_of_choice_zero_once_each_even_after_preemption(page_size: int) -> None:
    engine = Engine(executor_ready(page_size, num_pages=7, max_num_batched_tokens=12))
    requests = [make_request(i, page_size - 2, 3 * page_size, n=2, prompt_logprobs=0) for i in (1, 2)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.choices[1, 1].finishes[0].num_preemptions + engine.choices[2, 0].finishes[0].num_preemptions > 0
    sent = [new for step in engine.steps for new in step.new_sequences]
    assert {new.sampling.prompt_logprobs for new in sent if new.choice == 1} == {-1}
    assert len(sent) > 4
    assert sent[0].sampling.prompt_logprobs == 0
    assert sent[-1].sampling.prompt_logprobs == -1  # sent again with all of them known
    for request in requests:
        prompt = list(unpack_i32(request.prompt_token_ids))
        position = 0
        for chunk in engine.prompt_logprobs:
            if chunk.request_id != request.request_id:
                continue
            assert chunk.start == position
            assert unpack_i32(chunk.columns.counts).tolist() == [
                int(p > 0) for p in range(position, position + len(chunk.columns.counts) // 4)
            ]
            for value in unpack_f32(chunk.columns.values):
                position += position == 0
                assert value == position_logprob(prompt[: position + 1])
                position += 1
        assert position == len(prompt)


def test_prompt_logprobs_that_are_known_are_cut_off() -> None:
    """A recompute with other chunks repeats a part of what was handed on."""
    engine = Engine(executor_ready(max_num_batched_tokens=8), max_steps_in_flight=1)
    engine.add(make_request(1, 20, 5, prompt_logprobs=0))
    for first, count in ((0, 4), (2, 5), (0, 6), (7, 1)):
        step = engine.schedule()
        assert step is not None
        result = engine.in_flight[0]
        columns = LogprobColumns(
            pack_i32([1] * count), pack_i32(range(first, first + count)), bytes(4 * count), pack_i32([1] * count)
        )
        chunk = type(result.prompt_logprobs[0])(0, first, columns) if result.prompt_logprobs else None
        engine.in_flight[0] = ModelRunnerOutput(
            result.step_id, result.slots, result.token_ids, None, (chunk,) if chunk else (), 0, 0, 0
        )
        engine.deliver()
    seen = [(chunk.start, unpack_i32(chunk.columns.token_ids).tolist()) for chunk in engine.prompt_logprobs]
    assert seen == [(0, [0, 1, 2, 3]), (4, [4, 5, 6])]
