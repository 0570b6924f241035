"""Is this model served right? Decided on the loaded weights, before the first request.

Transformers' modelling code is open to anything: recurrent state beside attention, masks of its own, keywords that
change what attention means. Instead of a list of names this module looks at behaviour:

1. a pass in which every attention gives zeros must leave a token's logits untouched by every other token; otherwise
   something mixes tokens that the KV cache knows nothing about;
2. two short sequences go through the paged path packed together, in chunks and token by token; their logits must equal
   those of the model's own eager pass, in float32, within ``TOLERANCE`` of the logits' range.

Windows and attention chunks longer than the check's sequences would hide, so they are shrunk for both paths. Those that
no sequence will outgrow make no difference and are left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ringserve.engine.attention import ATTENTION_NAME, AttentionContext, PagedContext, TracingContext, index_layers
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.model_error import ModelError, first_line
from ringserve.kernels.paged_attention import PagedBatch

TOLERANCE = 1e-3
"""Largest difference of logits, as a part of their range."""

MIXING_TOLERANCE = 1e-5
"""The same for tokens that must not see one another."""

LENGTHS = (15, 10)
"""Tokens of the two sequences."""

STEPS = (((0, 7), (0, 9)), ((7, 15), (9, 10)))
"""What each step computes of the two sequences: chunks packed; a later chunk beside a decode."""

NOT_FINITE = "the model's own logits are not finite; its weights are damaged: download them again"

SMALL_WINDOW = 4
CHECK_PAGE_SIZE = 8
WINDOW_NAME = re.compile(
    r"(sliding_window(_size)?|attention_window(_size)?|window_size|local_window|attention_chunk_size)"
)


@dataclass(frozen=True)
class TracedModel:
    """What a pass through the model shows."""

    modules: tuple[nn.Module, ...]
    """Attention modules in the order of their calls."""
    layers: tuple[LayerKV, ...]
    vocab_size: int
    """Columns of the logits."""


def check_model(model: nn.Module, free_bytes: int = 1 << 62, max_model_len: int = 1 << 62) -> TracedModel:
    """Raises ModelError with the reason where the model would not be served right. ``free_bytes``: what it may use;
    ``max_model_len``: the longest sequence that will be served, in tokens."""
    with torch.inference_mode(), _float32(model, free_bytes), _small_windows(model, max_model_len):
        sequences = spread_sequences(model)
        traced = _trace(model, sequences[0])
        reference = _reference(model, sequences)
        served = _served(model, traced, sequences)
        for expected, got in zip(reference, served, strict=True):
            _compare(expected, got)
    return traced


def trace_model(model: nn.Module, free_bytes: int = 1 << 62, max_model_len: int = 1 << 62) -> TracedModel:
    """The first half of ``check_model``, on whatever device the model is."""
    with torch.inference_mode(), _float32(model, free_bytes), _small_windows(model, max_model_len):
        return _trace(model, spread_sequences(model)[0])


def check_other_path(
    model: nn.Module,
    compute: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    lengths: Sequence[int],
    tolerance: float,
    free_bytes: int = 1 << 62,
    max_model_len: int = 1 << 62,
) -> None:
    """Raises ModelError where another implementation of ``model``, with rounded numbers, does not give its logits.

    ``compute`` takes sequences of ``lengths`` token ids and returns the logits of all their tokens. The root mean
    square of the differences may be ``tolerance`` of that of the model's own float32 logits (about their mean):
    rounding is a matter of all logits, so is a mistake. While it runs, windows are small and ``model``'s weights are
    its own again; it may take them, since they are not needed afterwards.
    """
    with torch.inference_mode(), _small_windows(model, max_model_len):
        sequences = spread_sequences(model, lengths)
        with _float32(model, free_bytes):
            expected = torch.cat(_reference(model, sequences))
        got = torch.cat(list(compute(sequences)))
    if not bool(torch.isfinite(expected).all()):
        raise ModelError(NOT_FINITE)
    difference = float((expected - got).square().mean().sqrt() / (expected.std() + 1e-30))
    if not difference <= tolerance:  # "not <=" catches NaN
        raise ModelError(f"its logits differ from the model's own by {difference:.1e} of their spread")


def spread_sequences(model: nn.Module, lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    """Token ids spread over the vocabulary, the same at every start."""
    weight = cast(Any, model).get_input_embeddings().weight
    generator = np.random.default_rng(1234)
    return [torch.from_numpy(generator.integers(0, weight.shape[0], n)).to(weight.device) for n in lengths]


def eager_logits(model: nn.Module, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What ``model``'s own code makes of sequences of token ids: [tokens, vocab_size] each. Raises ModelError."""
    with torch.inference_mode():
        return _reference(model, sequences)


def _forward(
    model: nn.Module, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: AttentionContext
) -> torch.Tensor:
    output = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=rows,
        attention_context=context,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _trace(model: nn.Module, token_ids: torch.Tensor) -> TracedModel:
    """Find the attention layers, and whether anything else mixes tokens."""
    changed = token_ids.clone()
    half = len(token_ids) // 2
    changed[half] = (changed[half] + 1) % int(token_ids.max() + 1)
    positions = torch.arange(len(token_ids), device=token_ids.device)
    rows = torch.tensor([i for i in range(len(token_ids)) if i != half], device=token_ids.device)
    context = TracingContext()
    try:
        logits = _forward(model, token_ids, positions, rows, context)
        after = _forward(model, changed, positions, rows, TracingContext())
    except ModelError as error:
        raise ModelError(f"{_name(model)} cannot be served: {error}") from error
    except Exception as error:  # whatever modelling code does with a call it was not written for
        raise ModelError(
            f"{_name(model)} cannot be served: its code does not take a packed step through transformers' attention "
            f"interface ({type(error).__name__}: {first_line(error)})"
        ) from error
    if not context.layers:
        raise ModelError(f"{_name(model)} cannot be served: its code does not use transformers' attention interface")
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise ModelError(f"{_name(model)} cannot be served: its code does not take logits_to_keep")
    spread = _range(logits)
    worst = float((logits - after).abs().max())
    if not worst <= MIXING_TOLERANCE * spread:
        raise ModelError(
            f"{_name(model)} cannot be served: some of its layers mix tokens outside of attention (a convolution, a "
            "recurrence or linear attention), whose state the KV cache does not hold"
        )
    return TracedModel(tuple(context.layers), tuple(context.layers.values()), int(logits.shape[1]))


def _reference(model: nn.Module, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The model's own eager pass, each sequence alone."""
    with _attention(model, "eager"):
        try:
            return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
        except Exception as error:  # as in _trace
            raise ModelError(
                f"{_name(model)} cannot be checked: its own eager pass fails "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error


def _served(model: nn.Module, traced: TracedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same through pages, by ``STEPS``."""
    pages = [-(-len(ids) // CHECK_PAGE_SIZE) for ids in sequences]
    # Tables run backwards and interleave, so that a page is never where its number would put it.
    tables = [torch.arange(sum(pages) - i, 0, -2, dtype=torch.int64)[:n] for i, n in enumerate(pages)]
    pool = KVPool(traced.layers, sum(pages), CHECK_PAGE_SIZE, "float32")
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    index_of = index_layers(traced.modules)
    for step in STEPS:
        active = list(enumerate(step))
        token_ids = torch.cat([sequences[i][start:stop] for i, (start, stop) in active])
        positions = torch.cat([torch.arange(start, stop) for _, (start, stop) in active])
        slots = torch.cat([slot_mapping(tables[i], start, stop, CHECK_PAGE_SIZE) for i, (start, stop) in active])
        starts = list(itertools.accumulate((stop - start for _, (start, stop) in active), initial=0))
        batch = PagedBatch(
            query_start=starts,
            context_lens=[stop for _, (_, stop) in active],
            block_tables=[tables[i] for i, _ in active],
        )
        context = PagedContext(pool, index_of, batch, slots)
        try:
            logits = _forward(model, token_ids, positions, torch.arange(len(token_ids)), context)
        except ModelError as error:
            raise ModelError(f"{_name(model)} cannot be served: {error}") from error
        except Exception as error:  # as in _trace; also shapes that the kernels refuse
            raise ModelError(
                f"{_name(model)} cannot be served: the paged attention does not take its layers "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
        for (i, _), start, stop in zip(active, starts, starts[1:], strict=False):
            parts[i].append(logits[start:stop])
    return [torch.cat(logits) for logits in parts]


def slot_mapping(table: torch.Tensor, start: int, stop: int, page_size: int) -> torch.Tensor:
    """int64 [stop - start]: where the keys of the positions ``[start, stop)`` lie in the pool."""
    positions = torch.arange(start, stop)
    return table[positions // page_size] * page_size + positions % page_size


def _compare(expected: torch.Tensor, got: torch.Tensor) -> None:
    if not bool(torch.isfinite(expected).all()):
        raise ModelError(NOT_FINITE)
    spread = _range(expected)
    worst = float((expected - got).abs().max())
    if not worst <= TOLERANCE * spread:  # "not <=" catches NaN
        raise ModelError(
            f"the model cannot be served right: its logits differ from its own eager pass by {worst / spread:.1e} of "
            "their range; its attention does something (a mask, a chunk, a bias) that the paged attention does not"
        )


def _range(logits: torch.Tensor) -> float:
    return float(logits.max() - logits.min()) or 1.0


def _name(model: nn.Module) -> str:
    return type(model).__name__


@contextlib.contextmanager
def _attention(model: nn.Module, name: str) -> Iterator[None]:
    """Switch the attention implementation of the model and every part of it."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        config._attn_implementation = name
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation = ATTENTION_NAME


LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def _float32(model: nn.Module, free_bytes: int) -> Iterator[None]:
    """Weights in float32 for a while, so that a difference is a mistake and not rounding: all at once where a copy fits
    into half of the free memory (faster), else each module's own while it computes."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in LOW_PRECISION]
    if sum(4 * t.numel() for t in tensors) <= free_bytes // 2:
        with _converted(tensors):
            yield
        return
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            own = [t for t in (*module.parameters(False), *module.buffers(False)) if t.dtype in LOW_PRECISION]
            if own:
                stack.enter_context(_converted_while_computing(module, own))
        yield


@contextlib.contextmanager
def _converted(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    kept = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.data = data


@contextlib.contextmanager
def _converted_while_computing(module: nn.Module, own: Sequence[torch.Tensor]) -> Iterator[None]:
    stack = contextlib.ExitStack()

    def convert(module: nn.Module, arguments: Any) -> None:
        stack.enter_context(_converted(own))

    def restore(module: nn.Module, arguments: Any, output: Any) -> None:
        stack.close()

    before = module.register_forward_pre_hook(convert)
    after = module.register_forward_hook(restore, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextlib.contextmanager
def _small_windows(model: nn.Module, max_model_len: int) -> Iterator[None]:
    """Shrink every window and attention chunk shorter than ``max_model_len``, in the configurations and where modules
    keep a copy."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        config = getattr(module, "config", None)
        if config is not None:
            owners[id(config)] = config
    changed: list[tuple[Any, str, int]] = []
    try:
        for owner in owners.values():
            for name, value in list(vars(owner).items()):
                if WINDOW_NAME.fullmatch(name) and type(value) is int and SMALL_WINDOW < value < max_model_len:
                    changed.append((owner, name, value))
                    setattr(owner, name, SMALL_WINDOW)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)
