"""The parts that need no engine: parameters, the job's bounds, interrupts."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import ringserve
from ringserve import SamplingParams
from ringserve.messages.columns import pack_i32, pack_u64
from ringserve.messages.requests import GenerateRequest, RequestRefused
from ringserve.messages.text_outputs import TextFinish, TextOutputs, TextStart
from ringserve.offline.encoding import EncodedPrompt
from ringserve.offline.errors import EngineError
from ringserve.offline.generation import GenerationJob
from ringserve.offline.interrupts import DeferredInterrupts
from ringserve.offline.sampling_params import _ANY_ENGINE, engine_params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", "2"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", ["a"] * 5),
        ("stop", [1]),
        ("stop", 5),
        ("stop", "half \ud800"),
        ("stop", ["a", "half \ud800"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("max_tokens", -1),
        ("max_tokens", "16"),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", "1"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 1.5),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("bad_words", ["half \ud800"]),
        ("bad_words", "a"),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 5),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: "a"}),
        ("skip_special_tokens", "no"),
        # Read when they are checked, and empty for every prompt.
        *((name, iter(["a"])) for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        SamplingParams(**{name: value})


def test_every_value_reaches_the_engine() -> None:
    params = engine_params(
        SamplingParams(
            n=2,
            temperature=0.5,
            top_p=0.9,
            top_k=-1,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            seed=-1,
            stop=("a", "b"),
            stop_token_ids=(7, 8),
            include_stop_str_in_output=True,
            ignore_eos=True,
            max_tokens=None,
            min_tokens=3,
            logprobs=0,
            prompt_logprobs=2,
            skip_special_tokens=False,
            logit_bias={5: -100, 3: 1.5},
            allowed_token_ids=(9, 4, 9),
            bad_words=("a b",),
        ),
        _ANY_ENGINE,
    )
    sampling = params.sampling
    assert (params.n, params.max_tokens, sampling.seed) == (2, None, 2**64 - 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.min_tokens) == (0, 2, 3)
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == pack_i32([7, 8])
    assert sampling.logit_bias_ids == pack_i32([3, 5])
    assert sampling.allowed_token_ids == pack_i32([4, 9])
    assert params.output.bad_words == ("a b",)
    assert params.output.stop == ("a", "b")
    assert params.output.include_stop_str_in_output
    assert not params.output.skip_special_tokens


def test_a_clone_is_equal_and_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, stop_token_ids=[3], allowed_token_ids=[1, 3], seed=5)
    copied = params.clone()
    assert copied == params
    assert isinstance(copied.stop, list)
    assert isinstance(copied.logit_bias, dict)
    copied.stop.append("b")
    copied.logit_bias[2] = 1.0
    copied.temperature = 0.0
    assert params == SamplingParams(
        stop=["a"], logit_bias={1: 2.0}, stop_token_ids=[3], allowed_token_ids=[1, 3], seed=5
    )


def test_a_gpu_has_no_such_masks() -> None:
    """The limits of a GPU's engine refuse what its sampler would not keep to."""
    ready = msgspec.structs.replace(_ANY_ENGINE.ready, device="cuda")
    limits = replace(_ANY_ENGINE, ready=ready)
    with pytest.raises(ValueError, match="allowed_token_ids is not supported on GPUs"):
        engine_params(SamplingParams(allowed_token_ids=[1]), limits)
    with pytest.raises(ValueError, match="bad_words is not supported on GPUs"):
        engine_params(SamplingParams(bad_words=["a"]), limits)


def test_the_package_offers_two_names() -> None:
    assert {"LLM", "SamplingParams"} <= set(dir(ringserve))
    with pytest.raises(AttributeError, match="no attribute 'Zebra'"):
        _ = ringserve.Zebra


class FakeEngine:
    """Answers requests with one token each."""

    def __init__(self, count: int, n: int, max_in_flight: int) -> None:
        self.progress = [0, 0, 0]
        self._last_id = 100
        params = engine_params(SamplingParams(n=n, max_tokens=1, temperature=0), _ANY_ENGINE)
        prompts = [EncodedPrompt(pack_i32([index]), None) for index in range(count)]
        self.job = GenerationJob(prompts, [params] * count, self._new_id, max_in_flight, self._count)

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _count(self, finished: int, prompt_tokens: int, output_tokens: int) -> None:
        for place, new in enumerate((finished, prompt_tokens, output_tokens)):
            self.progress[place] += new

    def take(self) -> list[GenerateRequest]:
        taken = []
        while (message := self.job.next_message()) is not None:
            assert isinstance(message, GenerateRequest)
            taken.append(message)
        return taken

    def finish(self, request_id: int, choice: int, token: int) -> None:
        self.job.handle(
            TextOutputs(
                request_ids=pack_u64([request_id]),
                choices=pack_i32([choice]),
                texts=(f"<{token}>",),
                token_counts=pack_i32([1]),
                token_ids=pack_i32([token]),
                starts=(TextStart(0, 1, 0, 0, 0, 0, 0, 1),),
                finishes=(TextFinish(0, "length", None, 1),),
                logprobs=(),
                times=None,
                stats=None,
                tokens_sent_ns=0,
                received_ns=0,
                sent_ns=0,
            )
        )


def test_no_more_in_flight_than_allowed() -> None:
    engine = FakeEngine(count=5, n=2, max_in_flight=4)
    first = engine.take()
    assert len(first) == 2
    engine.finish(first[1].request_id, 0, 11)
    assert engine.take() == []
    engine.finish(first[1].request_id, 1, 12)
    waiting = [first[0], *engine.take()]
    assert len(waiting) == 2
    while waiting:
        request = waiting.pop()
        assert request.request_id in engine.job.request_ids()
        for choice in range(2):
            engine.finish(request.request_id, choice, choice)
        waiting += engine.take()
    assert engine.job.done
    outputs = engine.job.outputs()
    assert [output.prompt_token_ids for output in outputs] == [[0], [1], [2], [3], [4]]
    assert [choice.token_ids for choice in outputs[1].outputs] == [[11], [12]]
    assert engine.progress == [5, 5, 10]


def test_a_request_with_more_choices_than_allowed_goes_alone() -> None:
    engine = FakeEngine(count=2, n=9, max_in_flight=4)
    (request,) = engine.take()
    for choice in range(9):
        engine.finish(request.request_id, choice, choice)
    assert len(engine.take()) == 1


def test_rows_of_a_job_that_was_given_up_are_nobodys() -> None:
    engine = FakeEngine(count=1, n=1, max_in_flight=4)
    (request,) = engine.take()
    engine.finish(5, 0, 9)
    engine.job.handle(RequestRefused(5, 400, "late"))
    assert not engine.job.done
    engine.finish(request.request_id, 0, 1)
    assert engine.job.outputs()[0].outputs[0].token_ids == [1]


def test_a_refusal_is_an_error_with_the_place() -> None:
    engine = FakeEngine(count=2, n=1, max_in_flight=4)
    requests = engine.take()
    with pytest.raises(EngineError, match=r"prompts\[1\] was refused: no room"):
        engine.job.handle(RequestRefused(requests[1].request_id, 400, "no room"))
    with pytest.raises(ValueError, match=r"prompts\[0\] was refused: nothing left"):
        engine.job.handle(RequestRefused(requests[0].request_id, 400, "nothing left", param="bad_words"))


def test_interrupts_wait_for_the_check() -> None:
    woken: list[int] = []
    with DeferredInterrupts(lambda: woken.append(1)) as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert woken == [1]
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_the_users_own_handler_is_called_late_and_once() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _frame: calls.append(signum))
    try:
        with DeferredInterrupts(lambda: None):
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_signals_alone() -> None:
    handlers: list[object] = []

    def work() -> None:
        with DeferredInterrupts(lambda: None):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
