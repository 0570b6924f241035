"""What a scheduler under test is given: an executor's capacities, and requests."""

from __future__ import annotations

import zlib

from simulated_tokens import EOS, VOCAB_SIZE, run_alone

from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import NO_TARGETS, ResumedChoice, ServiceTargets, TokenizedRequest
from ringserve.messages.sampling import SamplingDefaults, SamplingParams
from ringserve.messages.startup import ExecutorReady


def executor_ready(
    page_size: int = 16,
    num_pages: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    num_host_pages: int = 0,
    swap_bytes_per_second: float = 1e30,
) -> ExecutorReady:
    return ExecutorReady(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=pack_i32(EOS),
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        architecture="Fake",
        defaults=SamplingDefaults(),
        num_host_pages=num_host_pages,
        bytes_per_page=1000 if num_host_pages else 0,
        swap_bytes_per_second=swap_bytes_per_second if num_host_pages else 0.0,
    )


def make_request(
    request_id: int,
    num_prompt_tokens: int,
    max_tokens: int,
    n: int = 1,
    ignore_eos: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    resumed: tuple[ResumedChoice, ...] = (),
    family: int | None = None,
    num_shared_tokens: int = 0,
    cache_salt: str = "",
    priority: int = 0,
    tenant: str = "",
    targets: ServiceTargets = NO_TARGETS,
) -> TokenizedRequest:
    """A request whose prompt and seed follow from its id; the prompts of a ``family`` begin with the same tokens."""
    sources = [family if family is not None and i < num_shared_tokens else request_id for i in range(num_prompt_tokens)]
    prompt = [zlib.crc32(b"%d/%d" % (source, i)) % VOCAB_SIZE for i, source in enumerate(sources)]
    sampling = SamplingParams(
        seed=request_id,
        min_tokens=min_tokens,
        stop_token_ids=pack_i32(stop_token_ids),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return TokenizedRequest(
        request_id,
        pack_i32(prompt),
        sampling,
        n,
        max_tokens,
        priority=priority,
        resumed=resumed,
        cache_salt=cache_salt,
        tenant=tenant,
        targets=targets,
    )


def first_stop(request_id: int, num_prompt_tokens: int, token_ids: tuple[int, ...] = EOS) -> int:
    """Number of tokens that the request generates up to and including the first of these."""
    tokens, _, _ = run_alone(make_request(request_id, num_prompt_tokens, 400), 0, 512)
    return next(i for i, token in enumerate(tokens) if token in token_ids) + 1
