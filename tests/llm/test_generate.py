"""Batches through the real engine: the same tokens as transformers, in order, with every kind of parameter."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator

import pytest
import torch
from engine_core import default_model
from open_descriptors import descriptors
from reference import assert_equal_but_for_ties, generate, plain_model
from server_process import wait_for_end

from ringserve import LLM, SamplingParams
from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.rings import FrontendInbound, FrontendMessage
from ringserve.offline.progress_bar import BatchProgress
from ringserve.offline.prompts import PromptType

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TEXTS = ["The capital of France is", "Once upon a time", "def add(a, b):"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One of the default model, for tests that do not break it."""
    before = descriptors()
    engine = LLM(dtype="float32", max_model_len=512, threads=1, max_num_seqs=8, show_progress=False)
    pids = list(engine.pids().values())
    assert len(pids) == 3
    yield engine
    engine.close()
    engine.close()
    assert engine.pids() == {}
    assert wait_for_end(pids) == []
    assert descriptors() <= before


class Integrity:
    """Asks the scheduler what it holds."""

    def __init__(self, request_id: int) -> None:
        self._message: CheckIntegrity | None = CheckIntegrity(request_id)
        self.report: IntegrityReport | None = None

    @property
    def done(self) -> bool:
        return self.report is not None

    def next_message(self) -> FrontendMessage | None:
        message, self._message = self._message, None
        return message

    def handle(self, message: FrontendInbound) -> None:
        if isinstance(message, IntegrityReport):
            self.report = message

    def request_ids(self) -> Iterable[int]:
        return ()


def assert_nothing_runs(llm: LLM) -> None:
    job = Integrity(llm._engine.new_request_id())
    llm._engine.run(job)
    assert job.report is not None
    assert job.report.problems == ()
    assert (job.report.scheduler_requests, job.report.tokenizer_requests) == (0, 0)


def test_greedy_equals_transformers(llm: LLM) -> None:
    torch.set_num_threads(1)
    prompts = [llm.tokenize(text) for text in TEXTS]
    references = generate(plain_model(default_model()), prompts, 16)
    outputs = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert [output.prompt for output in outputs] == TEXTS
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert_equal_but_for_ties(references, [output.outputs[0].token_ids for output in outputs])
    for output in outputs:
        (choice,) = output.outputs
        assert output.finished
        assert choice.finish_reason == "length"
        assert choice.text == llm.detokenize(choice.token_ids)
        metrics = output.metrics
        assert metrics.first_token_time is not None
        assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """More than can run at a time, of several lengths, each with its own parameters."""
    count = 30
    prompts = [{"prompt_token_ids": [100 + index] * (1 + index % 7)} for index in range(count)]
    params = [SamplingParams(temperature=0, max_tokens=1 + index % 5, ignore_eos=True) for index in range(count)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + index % 5 for index in range(count)]
    assert [output.prompt for output in outputs] == [None] * count
    (alone,) = llm.generate(prompts[17], params[17])
    assert alone.outputs[0].token_ids == outputs[17].outputs[0].token_ids
    assert_nothing_runs(llm)


def test_ways_to_write_a_prompt(llm: LLM) -> None:
    ids = llm.tokenize(TEXTS[0])
    prompts: list[PromptType] = [TEXTS[0], {"prompt": TEXTS[0]}, {"prompt_token_ids": ids}, ids]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone == [together[0]] * 4
    assert llm.generate([], GREEDY) == []


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(conversation, GREEDY)
    assert answer.prompt is not None
    assert answer.prompt.endswith("<|im_start|>assistant\n")
    assert "capital of France" in answer.prompt
    (again,) = llm.generate({"prompt_token_ids": answer.prompt_token_ids}, GREEDY)
    assert again.outputs[0].text == answer.outputs[0].text

    several = llm.chat([conversation, [{"role": "user", "content": "Hi"}]], GREEDY)
    assert several[0].outputs[0].text == answer.outputs[0].text
    assert several[1].prompt_token_ids != answer.prompt_token_ids

    begun = [*conversation, {"role": "assistant", "content": "The capital is"}]
    (continued,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt is not None
    assert continued.prompt.endswith("The capital is")
    (templated,) = llm.chat(
        conversation, GREEDY, chat_template="{{ messages[0].content }} {{ x }}", chat_template_kwargs={"x": "!"}
    )
    assert templated.prompt == "What is the capital of France? !"


def test_several_choices_and_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    first, second = llm.generate([TEXTS[1], TEXTS[1]], params)
    tokens = [choice.token_ids for choice in first.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in second.outputs] == tokens
    assert len({tuple(each) for each in tokens}) == 3
    unseeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    one, other = llm.generate([TEXTS[1], TEXTS[1]], unseeded)
    assert one.outputs[0].token_ids != other.outputs[0].token_ids


def test_stops(llm: LLM) -> None:
    (plain,) = llm.generate(TEXTS[0], GREEDY)
    text, ids = plain.outputs[0].text, plain.outputs[0].token_ids
    word = text.split()[1]
    (stopped,) = llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=8, stop=[word]))
    choice = stopped.outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", word)
    assert choice.text == text[: text.index(word)]
    (kept,) = llm.generate(
        TEXTS[0], SamplingParams(temperature=0, max_tokens=8, stop=word, include_stop_str_in_output=True)
    )
    assert kept.outputs[0].text == text[: text.index(word) + len(word)]
    (by_id,) = llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[ids[2]]))
    assert (by_id.outputs[0].finish_reason, by_id.outputs[0].stop_reason) == ("stop", ids[2])
    assert by_id.outputs[0].token_ids == ids[:3]


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(TEXTS[0], params)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids) == 4
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert position[token_id].rank == 1
        assert [each.rank for each in position.values()] == [1, 2]
        assert position[token_id].decoded_token == llm.detokenize([token_id])
    total = sum(position[each].logprob for each, position in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    shown = [next(iter(each)) for each in output.prompt_logprobs[1:] if each is not None]
    assert shown == output.prompt_token_ids[1:]
    (without,) = llm.generate(TEXTS[0], GREEDY)
    assert without.prompt_logprobs is None
    assert (without.outputs[0].logprobs, without.outputs[0].cumulative_logprob) == (None, None)


def test_none_is_the_models_default(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert defaults.max_tokens == 16
    (output,) = llm.generate(TEXTS[0])
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    (full,) = llm.generate([[5] * 500], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(full.outputs[0].token_ids) == 12
    assert full.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["fine", [5] * 512], r"prompts\[1\]: prompt is too long: it has 512 tokens.*512 tokens \(max_model_len\)"),
        ("word " * 600, "prompt is too long"),
        ("x" * 50_000, "too long"),
        (["fine", ""], r"prompts\[1\]: prompt must not be empty"),
        ({"prompt_token_ids": []}, r"prompt\['prompt_token_ids'\] must not be empty"),
        ({"prompt_token_ids": [1, 10**6]}, "token ids from 0 to"),
        ({"prompt_token_ids": [1, -1]}, "token ids from 0 to"),
        ({"prompt_token_ids": ["a"]}, "must be a list of integers"),
        (["fine", {"multi_modal_data": 1}], r"prompts\[1\]: 'multi_modal_data' is not supported"),
        ([1.5], r"prompts\[0\] must be text"),
        (None, "prompts must be text"),
        (b"text", "prompts must be text"),
        ([b"text"], r"prompts\[0\] must be text"),
        (["fine", "half \ud800"], r"prompts\[1\] holds half of a surrogate pair"),
        ({"prompt": "half \udc00"}, r"prompt\['prompt'\] holds half of a surrogate pair"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompts: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]  # that is the point
    assert_nothing_runs(llm)
    assert llm.generate(TEXTS[0], SamplingParams(max_tokens=1, temperature=0))[0].finished


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "tool", "content": "x"}], r"messages\[0\].role must be one of"),
        ([[{"role": "user", "content": "x"}], [{"role": "user"}]], r"conversation 1: messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ("hello", "messages must be a list"),
        (["hello"], r"messages\[0\]: expected `object`"),
        ([[{"role": "user", "content": "x"}], [{"role": "user", "content": "\ud800"}]], "conversation 1: .*surrogates"),
    ],
)
def test_a_bad_conversation_is_refused(llm: LLM, messages: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.chat(messages, GREEDY)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chat_template": 5}, "chat_template must be text, not int"),
        ({"chat_template": "\ud800"}, "chat_template holds half"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be a mapping"),
        ({"chat_template_kwargs": {"x": object()}}, "^chat_template_kwargs: .* object"),
        ({"chat_template_kwargs": {(1, 2): 3}}, "^chat_template_kwargs: "),
        ({"chat_template_kwargs": {"x": 10**30}}, "64 bits"),
        ({"add_generation_prompt": "x"}, "add_generation_prompt"),
        ({"sampling_params": 5}, "sampling_params must be SamplingParams, not int"),
        ({"sampling_params": "x"}, "sampling_params must be SamplingParams, not str"),
    ],
)
def test_no_argument_of_chat_harms_the_engine(llm: LLM, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.chat([{"role": "user", "content": "x"}], **options)  # type: ignore[arg-type]  # that is the point
    assert llm.generate(TEXTS[0], SamplingParams(max_tokens=1, temperature=0))[0].finished


def test_masks_through_the_engine(llm: LLM) -> None:
    """What is not allowed is not drawn; what is bad is not completed."""
    plain = SamplingParams(temperature=0, max_tokens=12)
    (answer,) = llm.generate("The capital of France is", plain, use_tqdm=False)
    ids = answer.outputs[0].token_ids
    masked = plain.clone()
    masked.bad_words = [llm.detokenize([ids[0]])]
    (answer,) = llm.generate("The capital of France is", masked, use_tqdm=False)
    assert ids[0] not in answer.outputs[0].token_ids
    allowed = plain.clone()
    allowed.allowed_token_ids = ids[::-1]
    (answer,) = llm.generate("The capital of France is", allowed, use_tqdm=False)
    assert answer.outputs[0].token_ids == ids
    allowed.allowed_token_ids = llm.tokenize("yes no")
    allowed.ignore_eos = True
    (answer,) = llm.generate("The capital of France is", allowed, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 12
    assert set(answer.outputs[0].token_ids) <= set(allowed.allowed_token_ids)
    (token,) = llm.tokenize(masked.bad_words[0])
    allowed.allowed_token_ids, allowed.bad_words = [token], masked.bad_words
    with pytest.raises(ValueError, match="bad_words must leave a token"):
        llm.generate("The capital of France is", allowed, use_tqdm=False)
    assert llm.generate("The capital of France is", plain, use_tqdm=False)[0].outputs[0].token_ids == ids


def test_parameters_that_only_the_model_can_judge(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"logprobs must be between 0 and 20, got 21"):
        llm.generate("x", SamplingParams(logprobs=21))
    with pytest.raises(ValueError, match="n must be between 1 and 128"):
        llm.generate("x", SamplingParams(n=129))
    with pytest.raises(ValueError, match="stop_token_ids must hold token ids from 0 to"):
        llm.generate("x", SamplingParams(stop_token_ids=[10**6]))
    with pytest.raises(ValueError, match="2 for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams, not dict"):
        llm.generate("x", {"temperature": 0})  # type: ignore[arg-type]  # that is the point


def test_ctrl_c_ends_the_batch_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def update(_self: BatchProgress, _finished: int, _prompt_tokens: int, output_tokens: int) -> None:
        seen.append(output_tokens)
        if sum(seen) > 10:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(BatchProgress, "update", update)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS * 10, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    assert signal.getsignal(signal.SIGINT) is handler
    (output,) = llm.generate(TEXTS[0], GREEDY)
    assert output.outputs[0].text.startswith(" Paris")
    assert_nothing_runs(llm)


def test_an_exception_in_the_middle_leaves_it_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(_self: BatchProgress, _finished: int, _prompt_tokens: int, _output_tokens: int) -> None:
        raise LookupError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(BatchProgress, "update", update)
        with pytest.raises(LookupError, match="planted"):
            llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert llm.generate(TEXTS[0], GREEDY)[0].outputs[0].text.startswith(" Paris")
    assert_nothing_runs(llm)


def test_threads_take_turns(llm: LLM) -> None:
    got: dict[int, str] = {}

    def work(index: int) -> None:
        got[index] = llm.generate(TEXTS[index], GREEDY)[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {index: llm.generate(TEXTS[index], GREEDY)[0].outputs[0].text for index in range(3)}


def test_tokens(llm: LLM) -> None:
    text = "héllo wörld <|im_end|>"
    assert llm.detokenize(llm.tokenize(text)) == text
    assert llm.detokenize([]) == ""
    with pytest.raises(ValueError, match="token_ids must hold token ids from 0 to"):
        llm.detokenize([10**6])
    for wrong in (5, None, b"x", "half \ud800"):
        with pytest.raises(ValueError, match=r"^text "):
            llm.tokenize(wrong)  # type: ignore[arg-type]  # that is the point
    for none in (5, None, ["x"]):
        with pytest.raises(ValueError, match=r"^token_ids must be"):
            llm.detokenize(none)  # type: ignore[arg-type]  # that is the point
    assert os.getpid() not in llm.pids().values()
