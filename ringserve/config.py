"""Configuration, declared once.

Each field's annotation holds its help; the command line, the keys of ``--config FILE.toml`` and the reference in
``docs/configuration.md`` are generated from these Structs (``ringserve/cli.py``). Flags are named as vLLM's where they
mean the same. What is discovered at start (pages, vocabulary, eos ids) is never written back here: it is a message
(``ExecutorReady``).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of options: one heading in ``--help``, one slice for a process."""


class ModelConfig(_Group, frozen=True):
    """Model"""

    model: Annotated[
        str | None,
        Meta(
            description="Directory in Hugging Face layout, GGUF file, or hub id. "
            "Default: the embedded SmolLM2-135M-Instruct."
        ),
    ] = None
    served_model_name: Annotated[str | None, Meta(description="Name clients use; default: the model's own name.")] = (
        None
    )
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a hub model.")] = None
    tokenizer: Annotated[
        str | None, Meta(description="Directory with the tokenizer's files, if they are not beside the weights.")
    ] = None
    chat_template: Annotated[str | None, Meta(description="File with a Jinja chat template.")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(
            description="Type of weights and of keys/values (but see --kv-cache-dtype); auto: bfloat16 where the "
            "processor computes in it, else float32."
        ),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None,
        Meta(
            description="Longest sequence, prompt and answer together, in tokens, at least 2. Default: the model's own."
        ),
    ] = None


class ExecutorConfig(_Group, frozen=True):
    """Execution and KV cache"""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Where the model runs. auto: on a GPU where there is one that can serve it, else on the CPU."),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "fast", "transformers"],
        Meta(
            description="How the model is computed. fast: the engine's own code for the Llama family (in bfloat16 or "
            "int8); transformers: its modelling code, for every architecture; auto: fast where it applies."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "fp8"],
        Meta(
            description="int8: weights in 8 bits, quantised at load, one scale for each output channel (on CPUs for 64 "
            "inputs of it); fp8: float8 e4m3, one scale for each output channel, on GPUs."
        ),
    ] = "none"
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        Meta(
            description="Type of keys and values. int8: 8 bits, one scale for each token and kv head, about twice as "
            "many tokens in the same memory; fp8: the same as float8 e4m3, on GPUs; auto: the model's type."
        ),
    ] = "auto"
    threads: Annotated[
        Positive | None,
        Meta(
            description="Threads the executor computes with. Default: on the fast path as many as there are cores, "
            "else one less, at least one."
        ),
    ] = None
    block_size: Annotated[
        int | None,
        Meta(
            description="Tokens in a KV page, a power of two from 8 to 128. "
            "Default: the device's (64 on CPUs, 16 on GPUs)."
        ),
    ] = None
    kv_cache_memory: Annotated[
        Positive | None,
        Meta(
            description="Bytes for the KV cache (suffixes K, M, G allowed). Default on CPUs: what max-num-seqs "
            "sequences of max-model-len need, at most 4G and a quarter of the free memory; on GPUs: see "
            "--gpu-memory-utilization."
        ),
    ] = None
    swap_space: Annotated[
        NotNegative | None,
        Meta(
            description="Bytes of the host's memory (suffixes K, M, G allowed) for KV pages of preempted sequences, "
            "which come back where copying is quicker than computing them again; 0: always compute again. Default: 4G "
            "on GPUs, at most a quarter of the host's free memory; 0 on CPUs, where a larger kv-cache-memory is the "
            "better use of it.",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Part of a GPU's memory that may be in use, by this server and others: the KV cache gets what "
            "weights and the largest step leave of it.",
        ),
    ] = 0.9
    enforce_eager: Annotated[bool, Meta(description="On GPUs: launch every kernel of a step, use no CUDA graphs.")] = (
        False
    )


class SchedulerConfig(_Group, frozen=True):
    """Scheduling"""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="Sequences computed at the same time.")] = 64
    max_num_batched_tokens: Annotated[
        Positive | None,
        Meta(
            description="Tokens computed in one step (prompt chunks and decodes together). "
            "Default: the device's (256 on CPUs, 2048 on GPUs)."
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "deadline", "fair"],
        Meta(
            description="Who is served first. fcfs: in the order of arrival; priority: by the requests' priority, "
            "lower first; deadline: whose deadline is next; fair: equal service for each tenant."
        ),
    ] = "fcfs"
    priority_aging: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="With policy priority: seconds of waiting that are worth one level of priority; 0: no aging.",
        ),
    ] = 30.0
    default_deadline: Annotated[
        float,
        Meta(
            gt=0,
            le=1e6,
            description="With policy deadline: seconds after its arrival at which a request without a deadline is "
            "served as if due.",
        ),
    ] = 60.0
    tenant_weights: Annotated[
        str,
        Meta(description="With policy fair: shares such as key-1=2,key-2=1; tenants that are not named have weight 1."),
    ] = ""
    input_token_price: Annotated[
        float, Meta(gt=0, le=1e6, description="With policy fair: what a prompt token counts.")
    ] = 1.0
    output_token_price: Annotated[
        float, Meta(gt=0, le=1e6, description="With policy fair: what a generated token counts.")
    ] = 2.0
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the keys and values of prompts that begin like one computed before.")
    ] = True
    session_ttl: Annotated[
        float,
        Meta(
            ge=0,
            le=1e8,
            description="Seconds that the keys and values of a conversation (session_id) are kept for its next turn; "
            "0: sessions are not kept.",
        ),
    ] = 600.0
    session_pool_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the KV cache that sessions may keep, 0 to 1. Running requests get these pages, too, "
            "when there are no others.",
        ),
    ] = 0.5
    kv_reservation: Annotated[
        Literal["prompt", "sequence"],
        Meta(
            description="KV pages that a sequence takes as it starts. prompt: those of its prompt, more as it grows "
            "(it may be preempted for want of them); sequence: those of its longest answer, too (never preempted for "
            "pages, but fewer run)."
        ),
    ] = "prompt"
    preemption_resume_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="A preempted sequence resumes once there are pages for so many steps of it and all that run.",
        ),
    ] = 32
    target_itl_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Time between tokens that prompts must leave to the sequences that decode: the share of a "
            "step that prompts get is cut to what keeps it. 0: prompts fill every step.",
        ),
    ] = 0.0
    max_num_queued_tokens: Annotated[
        Positive | None, Meta(description="Prompt tokens that may wait for their first step. Default: no bound.")
    ] = None
    max_num_queued_per_tenant: Annotated[
        Positive | None, Meta(description="Choices of one tenant that may wait. Default: no bound.")
    ] = None
    queue_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Seconds that a request may wait for its first step, at least 0.001; 0: no limit.",
        ),
    ] = 0.0
    max_predicted_wait: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Predicted seconds of waiting beyond which a request is refused at once; 0: no limit.",
        ),
    ] = 0.0
    overload_status: Annotated[
        int, Meta(description="HTTP status of requests refused for overload: 503 or 429, with Retry-After.")
    ] = 503


def parse_tenant_weights(text: str) -> dict[str, float]:
    """ "a=2,b=0.5" -> {"a": 2.0, "b": 0.5}.

    Raises:
        ValueError: not of this form, or a weight is not positive.
    """
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not equals or not 0 < weight < float("inf"):
            raise ValueError(f"{part!r} is not of the form TENANT=WEIGHT with a positive weight")
        weights[name.strip()] = weight
    return weights


class FrontendConfig(_Group, frozen=True):
    """HTTP server"""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: any free one.")] = 8000
    api_key: Annotated[
        tuple[str, ...],
        Meta(description="Key that every route but /health and /ready asks for; may be given several times."),
    ] = ()
    max_num_queued_reqs: Annotated[
        int, Meta(ge=0, description="Choices that may wait beyond max-num-seqs; more are refused with Retry-After.")
    ] = 512
    max_body_size: Annotated[
        int, Meta(ge=1024, description="Largest request body in bytes (suffixes K, M, G allowed).")
    ] = 32 * 1024 * 1024
    sse_keep_alive_interval: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="Seconds of silence after which a stream gets a comment line, at least 0.1; 0: never.",
        ),
    ] = 15.0
    max_logprobs: Annotated[int, Meta(ge=0, description="Largest logprobs / top_logprobs a request may ask for.")] = 20
    max_n: Annotated[int, Meta(ge=1, description="Largest n a request may ask for.")] = 128
    shutdown_timeout: Annotated[
        float, Meta(ge=0, le=86400, description="Seconds that running requests get to finish after SIGTERM or SIGINT.")
    ] = 30.0
    debug_endpoints: Annotated[bool, Meta(description="Serve /debug/integrity.")] = False


class TransportConfig(_Group, frozen=True):
    """Rings"""

    transport: Annotated[
        Literal["auto", "ring", "socket"],
        Meta(
            description="ring: shared memory (needs the C extension); socket: a pair of Unix sockets; "
            "auto: ring where it can be built."
        ),
    ] = "auto"
    ring_capacity: Annotated[
        int, Meta(ge=65536, le=1 << 30, description="Bytes of each ring, a power of two (suffixes K, M allowed).")
    ] = 1024 * 1024
    ring_spin_us: Annotated[
        int,
        Meta(
            ge=0,
            le=20,
            description="Microseconds that scheduler and executor may look around before they sleep; only while sleeps "
            "are that short, and off where there are fewer processors than processes. 0: never.",
        ),
    ] = 0


class LoggingConfig(_Group, frozen=True):
    """Logging"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="What is worth a line on stderr.")
    ] = "info"


class ServeConfig(_Group, frozen=True):
    """Everything ``ringserve serve`` takes; the keys of a configuration file are the same with underscores."""

    model: ModelConfig = ModelConfig()
    executor: ExecutorConfig = ExecutorConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    frontend: FrontendConfig = FrontendConfig()
    transport: TransportConfig = TransportConfig()
    logging: LoggingConfig = LoggingConfig()


class ModelSource(msgspec.Struct, frozen=True):
    """A model resolved to files on this machine."""

    path: str
    """Absolute path of a directory in Hugging Face layout, or of a GGUF file."""
    kind: Literal["directory", "gguf"]
    name: str
    """What clients call it."""


# ----------------------------------------------------------------------- the slices that the processes get


class FrontendSettings(msgspec.Struct, frozen=True):
    """The frontend's slice."""

    index: int
    """Upper 16 bits of the request ids it gives out."""
    model_name: str
    max_num_seqs: int
    version: str
    config: FrontendConfig
    overload_status: int = 503
    log_level: str = "info"


class TokenizerSettings(msgspec.Struct, frozen=True):
    """The tokenizer process's slice."""

    source: ModelSource
    tokenizer: str | None
    chat_template: str | None
    """File."""
    log_level: str = "info"


class SchedulerSettings(msgspec.Struct, frozen=True):
    """The scheduler's slice."""

    config: SchedulerConfig
    log_level: str = "info"


class ExecutorSettings(msgspec.Struct, frozen=True):
    """The executor's slice."""

    source: ModelSource
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    config: ExecutorConfig
    log_level: str = "info"
