"""What is told while the server starts: to the frontend through the rings, to the supervisor through a pipe.

    frontend <-- tokenizer <-- scheduler <--ExecutorReady, LoadProgress-- executor
    supervisor <--Progress, Started, StartFailed-- every child

The executor's progress goes both ways: into /health, and onto the terminal.
"""

from __future__ import annotations

from ringserve.messages.sampling import SamplingDefaults
from ringserve.messages.structs import Message


class ExecutorReady(Message, frozen=True):
    """Everything discovered at start. Forwarded up to the frontend."""

    vocab_size: int
    """Rows of the model's output layer: valid token ids are below it."""
    max_model_len: int
    eos_token_ids: bytes
    """int32: all ids that end a sequence."""
    num_pages: int
    """Usable pages; their ids are 1 .. num_pages."""
    page_size: int
    """Tokens per page."""
    max_num_seqs: int
    """Slots 0 .. max_num_seqs - 1."""
    max_num_batched_tokens: int
    dtype: str
    kv_dtype: str
    device: str
    architecture: str
    defaults: SamplingDefaults
    num_threads: int = 1
    load_seconds: float = 0.0
    model_impl: str = "transformers"
    """``fast`` or ``transformers``."""
    quantization: str = "none"
    instructions: str = ""
    """What the fast path's kernels use: ``avx512`` or ``portable``."""
    num_host_pages: int = 0
    """Pages of the swap space, with ids 0 .. num_host_pages - 1; 0: sequences are not swapped."""
    bytes_per_page: int = 0
    """Of a KV page, over all layers. With a swap space only, as is the next one."""
    swap_bytes_per_second: float = 0.0
    """Between the KV pool and the swap space, one way, measured at start."""


class LoadProgress(Message, frozen=True):
    """How far the executor's start is: shown in /health and by the supervisor's progress bar."""

    stage: str
    fraction: float


class Progress(Message, frozen=True):
    """A child's start-up progress, for the terminal."""

    stage: str
    fraction: float


class Started(Message, frozen=True):
    """A child is up. ``summary`` is what the supervisor's closing line says of it."""

    summary: dict[str, str | int | float]


class StartFailed(Message, frozen=True):
    """A child cannot start: one line with the remedy."""

    message: str


SupervisorInbound = Progress | Started | StartFailed
