"""The samplers of the slots: order of operations, independence of rows, resumption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ringserve.engine.sampler import NO_FINITE_LOGIT, Sampler, bad_words
from ringserve.kernels.philox import philox4x32, uniforms
from ringserve.kernels.sampling_reference import draw_reference, process_reference
from ringserve.messages.columns import pack_f32, pack_i32, unpack_f32, unpack_i32
from ringserve.messages.logprobs import LogprobColumns
from ringserve.messages.sampling import SamplingParams

VOCAB = 700
EOS = (3, 5)


def _logits(step: int, rows: int = 1, scale: float = 2.5) -> NDArray[np.float32]:
    return (np.random.default_rng(step).standard_normal((rows, VOCAB)) * scale).astype(np.float32)


def _params(seed: int = 0, bias: dict[int, float] | None = None, **changes: Any) -> SamplingParams:
    bias = bias or {}
    return SamplingParams(seed, logit_bias_ids=pack_i32(bias), logit_bias_values=pack_f32(bias.values()), **changes)


def _run(sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int], steps: range) -> list[int]:
    """Tokens of one sequence alone in its sampler; the logits depend on the step alone."""
    sampler = Sampler(VOCAB, EOS, 1)
    sampler.reset(0, sampling, 2, [*prompt, *generated], len(prompt))
    tokens = []
    for step in steps:
        (token_id,) = sampler.sample([0], _logits(step)).token_ids
        assert token_id is not None
        tokens.append(token_id)
    return tokens


def _forbidden(sampling: SamplingParams) -> set[int]:
    allowed = set(unpack_i32(sampling.allowed_token_ids).tolist())
    return set(range(VOCAB)) - allowed if allowed else set()


def _completing(sampling: SamplingParams, generated: Sequence[int]) -> list[int]:
    """Tokens with which ``generated`` would end with a bad word."""
    return [word[-1] for word in bad_words(sampling) if [*generated, word[-1]][-len(word) :] == list(word)]


MIXED = [
    _params(temperature=0.0),
    _params(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7),
    _params(11, temperature=0.8),
    _params(12, temperature=1.2, top_k=20, top_p=0.8, min_p=0.02),
    _params(2**64 - 1, top_p=0.5, repetition_penalty=0.7),
    _params(14, min_p=0.1, presence_penalty=-1.5, frequency_penalty=1.0, min_tokens=6, stop_token_ids=pack_i32([7, 9])),
    _params(15, min_tokens=30, ignore_eos=True, stop_token_ids=pack_i32([11]), bias={3: 30.0, 11: 31.0, 600: -5.0}),
    _params(16, temperature=0.0, min_tokens=4, bias={3: 40.0, 5: 39.0}),
    _params(17, allowed_token_ids=pack_i32([3, *range(50, 300)]), repetition_penalty=0.8, bias={3: 2.0, 400: 90.0}),
    _params(19, top_k=2, bad_word_ids=pack_i32([6, 8, 9, 8, 8]), bad_word_lengths=pack_i32([1, 2, 2]), bias={8: 30.0}),
    _params(18, temperature=0.0, allowed_token_ids=pack_i32(range(0, VOCAB, 3)), min_tokens=3),
]


@pytest.mark.parametrize("sampling", MIXED, ids=range(len(MIXED)))
def test_equals_the_reference_step_by_step(sampling: SamplingParams) -> None:
    prompt = [1, 2, 2, 400, 401]
    tokens = _run(sampling, prompt, [], range(40))
    bias = dict(
        zip(unpack_i32(sampling.logit_bias_ids).tolist(), unpack_f32(sampling.logit_bias_values).tolist(), strict=True)
    )
    ends = [*unpack_i32(sampling.stop_token_ids).tolist(), *(() if sampling.ignore_eos else EOS)]
    compared = 0
    for step, token_id in enumerate(tokens):
        processed = process_reference(
            _logits(step)[0],
            prompt,
            tokens[:step],
            bias=bias,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            hidden=[
                *(ends if step < sampling.min_tokens else []),
                *_forbidden(sampling),
                *_completing(sampling, tokens[:step]),
            ],
        )
        counter = np.array([[len(prompt) + step, 2, 0, 0]], dtype=np.uint32)
        key = np.array([[sampling.seed & 0xFFFFFFFF, sampling.seed >> 32]], dtype=np.uint32)
        uniform = float(uniforms(philox4x32(counter, key)[0, :1])[0])
        expected = draw_reference(
            processed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, uniform
        )
        if expected.margin > 1e-5:
            compared += 1
            assert token_id == expected.token_id, step
    assert compared > 35


def test_min_tokens_hides_ends_and_then_lets_them_come() -> None:
    assert [token in EOS for token in _run(MIXED[7], [1], [], range(8))] == [False] * 4 + [True] * 4
    assert _run(MIXED[6], [1], [], range(3)) == [3] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("allowed", [[0], [VOCAB - 1], [7, 8], list(range(100, 300)), list(range(VOCAB))])
def test_only_allowed_tokens_are_drawn(allowed: list[int], temperature: float) -> None:
    sampling = _params(21, temperature=temperature, allowed_token_ids=pack_i32(allowed))
    tokens = _run(sampling, [1], [], range(30))
    assert set(tokens) <= set(allowed)
    if len(allowed) == VOCAB:
        assert tokens == _run(_params(21, temperature=temperature), [1], [], range(30))


def test_bad_words_are_not_completed_and_their_parts_are_free() -> None:
    """Logits that want 1 2 3 4 1 2 3 4 ... get something else where a bad word would end, and nowhere before."""
    wanted = [1, 2, 3, 4] * 3

    def run(words: list[list[int]], prompt: list[int], generated: list[int]) -> list[int]:
        ids, lengths = pack_i32(id for word in words for id in word), pack_i32(map(len, words))
        sampling = _params(temperature=0.0, bad_word_ids=ids, bad_word_lengths=lengths)
        sampler = Sampler(VOCAB, EOS, 1)
        sampler.reset(0, sampling, 0, [*prompt, *generated], len(prompt))
        tokens = list(generated)
        for token in wanted[len(generated) :]:
            logits = np.zeros((1, VOCAB), np.float32)
            logits[0, token], logits[0, 9] = 2, 1
            (drawn,) = sampler.sample([0], logits).token_ids
            assert drawn is not None
            tokens.append(drawn)
        return tokens

    cases: list[tuple[list[list[int]], list[int]]] = [
        ([], wanted),
        ([[2]], [1, 9, 3, 4] * 3),
        ([[1, 2]], [1, 9, 3, 4] * 3),
        ([[2, 1]], wanted),
        ([[4, 1, 2]], [1, 2, 3, 4, 1, 9, 3, 4, 1, 9, 3, 4]),
        ([[1, 2, 3, 4], [3, 9]], [1, 2, 3, 0] * 3),
        ([wanted], [*wanted[:-1], 9]),
        ([[VOCAB], [1, VOCAB + 5], [-1]], wanted),
    ]
    for words, expected in cases:
        for prompt in ([0], [4], [1, 2, 3, 4]):  # what the prompt ends with begins no bad word
            assert run(words, prompt, []) == expected
            for split in (1, 4, 5, 11):
                assert run(words, prompt, expected[:split]) == expected


def test_ids_that_the_model_has_not_are_not_allowed() -> None:
    assert set(_run(_params(22, allowed_token_ids=pack_i32([-1, 6, VOCAB])), [1], [], range(5))) == {6}


@pytest.mark.parametrize("sampling", MIXED, ids=range(len(MIXED)))
def test_a_resumed_sequence_goes_on_as_if_nothing_had_happened(sampling: SamplingParams) -> None:
    prompt = [4, 8, 15, 16, 23, 42]
    whole = _run(sampling, prompt, [], range(12))
    for k in (0, 1, 5, 11):
        assert _run(sampling, prompt, whole[:k], range(k, 12)) == whole[k:]


def test_rows_do_not_depend_on_batch_mates_or_slots() -> None:
    alone = [_run(sampling, [7, 8], [], range(10)) for sampling in MIXED]
    sampler = Sampler(VOCAB, EOS, 2 * len(MIXED))
    slots = [2 * (len(MIXED) - i) - 1 for i in range(len(MIXED))]
    for slot, sampling in zip(slots, MIXED, strict=True):
        sampler.reset(slot, sampling, 2, np.array([7, 8], dtype=np.int32), 2)
    together: list[list[int | None]] = [[] for _ in MIXED]
    for step in range(10):
        order = list(range(len(MIXED)))
        order = order[step % len(order) :] + order[: step % len(order)]
        logits = np.repeat(_logits(step), len(order), axis=0)
        result = sampler.sample([slots[i] for i in order], logits)
        assert not result.failed
        for i, token_id in zip(order, result.token_ids, strict=True):
            together[i].append(token_id)
    assert together == alone


def test_choices_and_seeds_draw_differently() -> None:
    sampler = Sampler(VOCAB, EOS, 6)
    for slot, (seed, choice) in enumerate([(1, 0), (1, 1), (2, 0), (1 << 32, 0), (1, 0), (-1, 0)]):
        sampler.reset(slot, _params(seed & (2**64 - 1), temperature=3.0), choice, [1], 1)
    tokens = [sampler.sample(range(6), np.repeat(_logits(step), 6, axis=0)).token_ids for step in range(8)]
    columns = list(zip(*tokens, strict=True))
    assert columns[0] == columns[4]
    assert len(set(columns)) == 5


def test_a_row_without_a_finite_logit_fails_alone() -> None:
    sampler = Sampler(VOCAB, EOS, 5)
    params = [
        _params(temperature=0.0),
        _params(1),
        _params(temperature=0.0),
        _params(2, top_p=0.5, logprobs=1),
        _params(3, bias=dict.fromkeys(range(VOCAB), -np.inf)),
    ]
    for slot, sampling in enumerate(params):
        sampler.reset(slot, sampling, 0, [1], 1)
    logits = np.repeat(_logits(0), 5, axis=0)
    logits[0] = np.nan
    logits[1] = -np.inf
    logits[2, 17] = np.nan
    result = sampler.sample(range(5), logits)
    assert [slot for slot, _ in result.failed] == [0, 1, 4]
    assert {reason for _, reason in result.failed} == {NO_FINITE_LOGIT}
    assert result.token_ids[2] == int(_logits(0)[0].argmax())
    assert result.token_ids[3] is not None
    assert result.logprobs is not None
    assert unpack_i32(result.logprobs.counts).tolist() == [0, 2]
    # The failed slot stayed where it was.
    again = sampler.sample([1], _logits(0))
    fresh = Sampler(VOCAB, EOS, 1)
    fresh.reset(0, params[1], 0, [1], 1)
    assert again.token_ids == fresh.sample([0], _logits(0)).token_ids


def _values(columns: LogprobColumns) -> tuple[list[int], list[int], list[float], list[int]]:
    values: list[float] = np.frombuffer(columns.values, dtype=np.float32).tolist()
    return (
        unpack_i32(columns.counts).tolist(),
        unpack_i32(columns.token_ids).tolist(),
        values,
        unpack_i32(columns.ranks).tolist(),
    )


def test_logprobs_come_from_the_unprocessed_logits() -> None:
    sampler = Sampler(VOCAB, EOS, 3)
    sampler.reset(0, _params(temperature=0.0, logprobs=2, bias={100: 100.0}), 0, [1], 1)
    sampler.reset(1, _params(temperature=0.0), 0, [1], 1)
    sampler.reset(2, _params(temperature=0.0, logprobs=0), 0, [1], 1)
    logits = _logits(4, rows=3)
    logits[0, 101] = -np.inf
    result = sampler.sample([0, 1, 2], logits)
    assert result.token_ids[0] == 100
    assert result.logprobs is not None
    counts, ids, values, ranks = _values(result.logprobs)
    best = np.argsort(-logits, axis=1, kind="stable")
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert counts == [3, 0, 1]
    assert ids == [100, *best[0, :2].tolist(), int(best[2, 0])]
    np.testing.assert_allclose(values, [*exact[0, ids[:3]], exact[2, ids[3]]], atol=1e-5)
    assert ranks == [best[0].tolist().index(100) + 1, 1]
    assert sampler.sample([1], _logits(1)).logprobs is None


def test_prompt_logprobs() -> None:
    logits = _logits(9, rows=3)
    logits[1, 8] = -np.inf
    columns = Sampler(VOCAB, EOS, 1).prompt_logprobs(logits, np.array([4, 8, 15], dtype=np.int32), 1)
    counts, ids, values, ranks = _values(columns)
    assert counts == [2, 2, 2]
    assert ids[0::2] == [4, 8, 15]
    assert ids[1::2] == logits.argmax(axis=1).tolist()
    assert values[2] == -9999.0
    assert ranks[1] == VOCAB


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    sampler = Sampler(VOCAB, (VOCAB + 5, 3), 1)
    sampling = _params(temperature=0.0, min_tokens=1, stop_token_ids=pack_i32([VOCAB, -1]), bias={-2: 9.0, VOCAB: 9.0})
    sampler.reset(0, sampling, 0, [1], 1)
    assert sampler.sample([0], _logits(0)).token_ids == [int(_logits(0)[0].argmax())]


def test_a_slot_that_was_never_reset_is_an_error() -> None:
    with pytest.raises(KeyError):
        Sampler(VOCAB, EOS, 2).sample([1], _logits(0))
