"""``ringserve.LLM``: a model for batches of prompts in Python, with the names that users of vLLM know."""

from __future__ import annotations

import difflib
import os
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ringserve.config import ServeConfig
from ringserve.frontend.validation import Limits
from ringserve.messages.prompts import Prompt, TextPrompt
from ringserve.model_source import resolve_model
from ringserve.offline.encoding import DecodingJob, EncodingJob, check_lengths
from ringserve.offline.engine import Engine
from ringserve.offline.generation import MAX_WAITING, GenerationJob
from ringserve.offline.outputs import RequestOutput
from ringserve.offline.progress_bar import BatchProgress
from ringserve.offline.prompts import Conversation, PromptType, chat_messages, prompt_messages, tokens_prompt
from ringserve.offline.sampling_params import EngineParams, SamplingParams, engine_params, plain_text
from ringserve.options import OptionError, build_config, options


class LLM:
    """A model, loaded and ready.

    Three processes compute for it; they end with ``close``, with the ``with`` block, with the object, and with this
    process, however it ends. Threads may share one; their calls take turns.

    The options are those of ``ringserve serve`` under their names with underscores; None is the default there.

    Raises:
        ValueError: an option's value is wrong.
        TypeError: there is no such option.
        ModelNotFound: the model's files cannot be had.
        EngineStartError: the model cannot be run, with the reason.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        quantization: Literal["none", "int8", "fp8"] | None = None,
        kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto",
        model_impl: Literal["auto", "fast", "transformers"] = "auto",
        max_model_len: int | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        threads: int | None = None,
        block_size: int | None = None,
        kv_cache_memory: int | str | None = None,
        swap_space: int | str | None = None,
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        kv_reservation: Literal["prompt", "sequence"] = "prompt",
        preemption_resume_steps: int | None = None,
        max_logprobs: int | None = None,
        max_n: int | None = None,
        transport: Literal["auto", "ring", "socket"] = "auto",
        ring_capacity: int | str | None = None,
        ring_spin_us: int | None = None,
        log_level: Literal["debug", "info", "warning", "error"] = "warning",
        show_progress: bool = True,
        **unknown: Any,
    ) -> None:
        given = {
            "model": model,
            "revision": revision,
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "dtype": dtype,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "model_impl": model_impl,
            "max_model_len": max_model_len,
            "device": device,
            "threads": threads,
            "block_size": block_size,
            "kv_cache_memory": kv_cache_memory,
            "swap_space": swap_space,
            "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": enforce_eager,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
            "kv_reservation": kv_reservation,
            "preemption_resume_steps": preemption_resume_steps,
            "max_logprobs": max_logprobs,
            "max_n": max_n,
            "transport": transport,
            "ring_capacity": ring_capacity,
            "ring_spin_us": ring_spin_us,
            "log_level": log_level,
        }
        for name in unknown:
            raise TypeError(_no_such_option(name, given))
        config = _config(given)
        source = resolve_model(config.model.model, config.model.revision, config.model.served_model_name)
        self._engine = Engine(config, source, show_progress)
        self._finalizer = weakref.finalize(self, self._engine.destroy)
        self._lock = threading.Lock()
        self._owner: int | None = None
        """The thread whose turn it is."""
        self._closing = False
        ready = self._engine.ready
        self._max_in_flight = ready.max_num_seqs + MAX_WAITING
        self._limits = Limits(source.name, ready, config.frontend.max_logprobs, config.frontend.max_n, 2**31 - 1)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; answers come in the order of the prompts.

        Args:
            prompts: texts, ``{"prompt_token_ids": [...]}``, lists of token ids, or one of those.
            sampling_params: for all prompts, or one for each. None: the model's own defaults.
            use_tqdm: show a progress bar where there is a terminal.

        Raises:
            ValueError: a prompt or a parameter is wrong, or a prompt is too long; nothing was computed.
            EngineDied: a process of the engine ended; nothing is left of it.
            EngineClosed: it was closed.
        """
        return self._run(prompt_messages(prompts, self._limits.ready.vocab_size), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several.

        Args:
            messages: dictionaries with ``role`` and ``content``; a list of such lists is a batch.
            chat_template: Jinja, instead of the model's own.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: let the last message go on; needs ``add_generation_prompt=False``.
            chat_template_kwargs: more variables for the template.

        Raises:
            As ``generate``.
        """
        prompts = chat_messages(
            messages, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs
        )
        return self._run(prompts, sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation configuration."""
        defaults = self._limits.ready.defaults
        return SamplingParams(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            ValueError: the text has no tokens, or is none.
        """
        plain_text(text, "text")
        with self._turn() as engine:
            job = EncodingJob([TextPrompt(text, bool(add_special_tokens))], engine.new_request_id)
            engine.run(job)
        return job.encoded()[0].ids()

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens among them.

        Raises:
            ValueError: an id is outside the vocabulary, or none at all.
        """
        if isinstance(token_ids, Sized) and not len(token_ids):
            return ""
        prompt = tokens_prompt(token_ids, "token_ids", self._limits.ready.vocab_size)
        with self._turn() as engine:
            job = DecodingJob(prompt, engine.new_request_id())
            engine.run(job)
        return job.text or ""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self._limits.ready.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._limits.ready.vocab_size

    def pids(self) -> dict[str, int]:
        """The engine's process ids by role, for measurements; empty once it has ended."""
        return self._engine.pids()

    def close(self) -> None:
        """End the processes. May be called again; and while a call runs, by another thread or a signal handler: that
        call then raises EngineClosed."""
        self._closing = True
        self._engine.request_close()
        if self._owner != threading.get_ident():  # else we are in a handler, and the call it interrupted ends them
            with self._lock:
                self._engine.close()
        self._finalizer.detach()

    def shutdown(self) -> None:
        """``close`` under vLLM's name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _turn(self) -> Iterator[Engine]:
        """One call at a time."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield self._engine
            finally:
                self._owner = None
                if self._closing:
                    self._engine.close()

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self._params(sampling_params, len(prompts))
        with self._turn() as engine:
            encoding = EncodingJob(prompts, engine.new_request_id)
            engine.run(encoding)
            encoded = encoding.encoded()
            check_lengths(encoded, self.max_model_len)
            with BatchProgress(len(prompts), use_tqdm) as progress:
                job = GenerationJob(encoded, params, engine.new_request_id, self._max_in_flight, progress.update)
                engine.run(job)
        return job.outputs()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[EngineParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, str | Mapping) or not isinstance(given, SamplingParams | Iterable):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(given).__name__}")
        each = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(each) != count:
            raise ValueError(f"sampling_params: {len(each)} for {count} prompts")
        for params in each:
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        return [engine_params(params, self._limits) for params in each]


def _config(given: Mapping[str, Any]) -> ServeConfig:
    values = {
        name: os.fspath(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if value is not None
    }
    try:
        return build_config(values)
    except OptionError as error:
        name = re.compile(r"^(--[a-z-]+|MODEL)")
        text = name.sub(lambda found: found[0].lstrip("-").replace("-", "_").lower(), str(error))
        raise ValueError(text) from None


def _no_such_option(name: str, known: Mapping[str, Any]) -> str:
    if any(option.name == name for option in options()):
        return f"LLM() has no option {name!r}: it means something to `ringserve serve` only"
    close = difflib.get_close_matches(name, known, 1)
    return f"LLM() has no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
