"""One step of a decoder of the Llama family: a list of operations that a team of threads walks through.

``operations``: int64 [n, FIELDS], one row for each operation, columns named below. ``step``: int64 [STEP_FIELDS], what
changes from step to step. ``sizes``: int64 [SIZE_FIELDS], the model's. Addresses are bytes, strides are elements unless
they end in ``_BYTES``. Activations between operations lie in buffers that the operations name:

    EMBED    x = embedding[token]                                          float32 [tokens, hidden]
    NORM     y = rms_norm(x) in the linear layers' input type              [tokens, ld]
    LINEAR   out = y @ w + bias, or out += ...                             float32
    GATE_UP  y = silu(gate) * up in the next layer's input type
    ROTATE   q, k, v from the fused projection: head norms, rotary embedding; keys and values go into the pages
    ATTEND   y = attention, one (segment, kv head) after the other; with ROTATE inside where no token of the step sees
             another one's key through the same tile list (steps in which every sequence has one token). Where these
             are few and long, a tile is one span of the keys (``attention_spans``), and
    MERGE    y = attention, from the spans' states
    QUANTISE y = x as int8 with scales (after operations that produce their output in pieces)
    PICK     y = rms_norm(x[row]) for the rows whose logits are wanted

A segment is at most ``SEGMENT`` neighbouring tokens of one sequence, cut at multiples of that number: int64
[first token of the step, first position, tokens, address of the block table (int32)].

``kv`` says how pages are stored: KV_BFLOAT16 (``kv_pages``) or KV_INT8 (``kv_pages_int8``). It is a tuple whose type
compiled functions are specialised by, as a level is (``features``): what is not used is not compiled.

This module knows no request: slots, sampling and budgets are the caller's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba.extending import register_jitable

from ringserve.kernels.cpu.activation import silu_mul, silu_mul_bfloat16
from ringserve.kernels.cpu.attention_spans import SPAN, first_page, merge_states, normalise, state_bytes
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.kv_pages import write_key, write_value
from ringserve.kernels.cpu.kv_pages_int8 import write_key_int8, write_value_int8
from ringserve.kernels.cpu.linear_bf16 import PANEL, bf16_block
from ringserve.kernels.cpu.linear_int8 import int8_block
from ringserve.kernels.cpu.llvm import load_i32
from ringserve.kernels.cpu.norm import rms_norm, rms_norm_bfloat16
from ringserve.kernels.cpu.paged_attention import attend, attend_span, fetch_lines
from ringserve.kernels.cpu.paged_attention_int8 import attend_int8, attend_span_int8, split_queries
from ringserve.kernels.cpu.quantize import GROUP as INT8_GROUP
from ringserve.kernels.cpu.quantize import SCALE_WORDS, quantize_row
from ringserve.kernels.cpu.rope import rotate
from ringserve.kernels.cpu.row_best import best_key
from ringserve.kernels.cpu.team import RECORD, await_step, make_walk, next_epoch, set_operation, start_step
from ringserve.kernels.cpu.vector import load, load_bfloat16, read_i64, store, store_bfloat16, write_i64

# Kinds of operations.
EMBED, NORM, LINEAR, GATE_UP, ROTATE, ATTEND, QUANTISE, PICK, MERGE = range(9)
KIND_NAMES = ("embed", "norm", "linear", "gate_up", "rotate", "attend", "quantise", "pick", "merge")

# Columns of an operation.
KIND, INPUT, LD_INPUT, OUTPUT, LD_OUTPUT, WEIGHT, BIAS, K_PAD, COLUMNS, PANELS, GROUP, ADD, ROWS_OF = range(13)
KEYS, VALUES, WINDOW, Q_NORM, K_NORM, QUERIES = range(13, 19)
FORMAT, SCALES, LD_SCALES, WEIGHT_SCALES, FACTORS = range(19, 24)
KEY_SCALES, VALUE_SCALES = range(24, 26)
FIELDS = 26

# FORMAT: of a linear layer's weights and input; SCALES: of that input, or of what an operation writes. FACTORS: of the
# layer that reads what an operation writes.
BFLOAT16, INT8, FLOAT32 = 0, 1, 2

# How keys and values are stored; see the top of this file.
KVStorage = tuple[int, ...]
KV_BFLOAT16: Final[KVStorage] = ()
KV_INT8: Final[KVStorage] = (1,)

# ROWS_OF: how many rows an operation has.
TOKENS_ROWS, WANTED_ROWS = 0, 1

# What changes from step to step.
NUM_TOKENS, NUM_SEGMENTS, NUM_WANTED, SINGLE, TOKEN_IDS, SEGMENTS, WANTED, STAMPS, LOGITS, LD_LOGITS, BEST = range(11)
# SINGLE: ATTEND has ROTATE inside. SPANS: of the longest sequence, where ATTEND is cut at them, else 0. STATES: room
# for the spans' states, [segment, kv head, span].
SPANS, STATES = range(11, 13)
STEP_FIELDS = 16

# The model's sizes.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LD_QUERIES, COS, SIN, SCRATCH, SCRATCH_BYTES, SEGMENT = range(11)
THREADS = 11
SIZE_FIELDS = 16

EMBED_ROWS, NORM_ROWS = 16, 8
"""Rows of a tile."""
WHOLE_SEGMENTS = 8
"""From so many segments on, a tile of ATTEND is a segment with all kv heads."""
SPLIT_FROM = 2 * SPAN
"""Keys of the longest sequence from which on a step's attention may be cut at spans ..."""
TILES_EACH = 4
"""... where there are fewer tiles than this for each of several threads."""
GATE_UP_ROWS = 64
"""Rows whose gate and up projections lie in a thread's scratch memory at once: 24 KiB."""


@register_jitable  # type: ignore[untyped-decorator]
def _blocks(n: Any, size: Any) -> Any:
    return (n + size - 1) // size


@register_jitable  # type: ignore[untyped-decorator]
def _tiles(op: Any, step: Any, sizes: Any) -> Any:
    """Into how many tiles an operation is cut in this step."""
    kind = op[KIND]
    rows = step[NUM_WANTED] if op[ROWS_OF] == WANTED_ROWS else step[NUM_TOKENS]
    if rows == 0:
        return 0
    if kind == EMBED:
        return _blocks(rows, EMBED_ROWS)
    if kind in (NORM, PICK, QUANTISE):
        return _blocks(rows, NORM_ROWS)
    if kind in (LINEAR, GATE_UP):
        return _blocks(op[PANELS], op[GROUP])
    if kind == ROTATE:
        return 0 if step[SINGLE] else step[NUM_SEGMENTS]
    if kind == MERGE:
        return step[NUM_SEGMENTS] * sizes[KV_HEADS] if step[SPANS] > 0 else 0
    if step[SPANS] > 0:
        return step[NUM_SEGMENTS] * sizes[KV_HEADS] * step[SPANS]
    return step[NUM_SEGMENTS] * (1 if step[NUM_SEGMENTS] >= WHOLE_SEGMENTS else sizes[KV_HEADS])


@compiled
def _embed(op: Any, step: Any, sizes: Any, tile: int) -> None:
    hidden = sizes[HIDDEN]
    for row in range(tile * EMBED_ROWS, min((tile + 1) * EMBED_ROWS, step[NUM_TOKENS])):
        token = np.int64(load_i32(step[TOKEN_IDS] + 4 * row))
        out = op[OUTPUT] + 4 * row * op[LD_OUTPUT]
        source = op[WEIGHT] + 2 * token * hidden
        for i in range(0, hidden, 16):
            store(out + 4 * i, load_bfloat16(source + 2 * i))


@compiled
def _norm(op: Any, step: Any, sizes: Any, eps: Any, tile: int, scratch: int) -> None:
    picks = op[KIND] == PICK
    hidden = sizes[HIDDEN]
    rows = step[NUM_WANTED] if picks else step[NUM_TOKENS]
    for row in range(tile * NORM_ROWS, min((tile + 1) * NORM_ROWS, rows)):
        source = np.int64(load_i32(step[WANTED] + 4 * row)) if picks else row
        x = op[INPUT] + 4 * source * op[LD_INPUT]
        if op[FORMAT] == INT8:
            rms_norm(x, op[WEIGHT], hidden, eps, scratch)
            q, scales = op[OUTPUT] + row * op[LD_OUTPUT], op[SCALES] + 4 * row * op[LD_SCALES]
            quantize_row(scratch, hidden, op[K_PAD], op[FACTORS], q, scales)
        else:
            rms_norm_bfloat16(x, op[WEIGHT], hidden, eps, op[OUTPUT] + 2 * row * op[LD_OUTPUT])


@compiled
def _quantise(op: Any, step: Any, tile: int) -> None:
    for row in range(tile * NORM_ROWS, min((tile + 1) * NORM_ROWS, step[NUM_TOKENS])):
        q, scales = op[OUTPUT] + row * op[LD_OUTPUT], op[SCALES] + 4 * row * op[LD_SCALES]
        quantize_row(op[INPUT] + 4 * row * op[LD_INPUT], op[COLUMNS], op[K_PAD], op[FACTORS], q, scales)


@compiled
def _multiply(level: Any, op: Any, row: int, out: int, ldo: int, rows: int, first: int, last: int, add: int) -> None:
    """``rows`` rows from ``row`` on through the panels [first, last)."""
    if op[FORMAT] == INT8:
        x, scales = op[INPUT] + row * op[LD_INPUT], op[SCALES] + 4 * row * op[LD_SCALES]
        int8_block(
            level, op[WEIGHT], op[WEIGHT_SCALES], op[BIAS], x, op[LD_INPUT], scales, op[LD_SCALES],
            op[K_PAD], out, ldo, rows, op[COLUMNS], first, last, add,
        )  # fmt: skip
    else:
        x = op[INPUT] + 2 * row * op[LD_INPUT]
        bf16_block(
            level, op[WEIGHT], op[BIAS], x, op[LD_INPUT], op[K_PAD], out, ldo, rows, op[COLUMNS], first, last, add
        )


@compiled
def _linear(level: Any, op: Any, step: Any, tile: int) -> None:
    first = tile * op[GROUP]
    last = min(first + op[GROUP], op[PANELS])
    if op[ROWS_OF] == WANTED_ROWS:
        rows = step[NUM_WANTED]
        _multiply(level, op, 0, step[LOGITS], step[LD_LOGITS], rows, first, last, 0)
        column = first * PANEL
        count = min(last * PANEL, op[COLUMNS]) - column
        for row in range(rows):
            key = best_key(step[LOGITS] + 4 * (row * step[LD_LOGITS] + column), count, column)
            write_i64(step[BEST] + 8 * (tile * rows + row), key)
    else:
        _multiply(level, op, 0, op[OUTPUT], op[LD_OUTPUT], step[NUM_TOKENS], first, last, op[ADD])


@compiled
def _gate_up(level: Any, op: Any, step: Any, tile: int, scratch: int) -> None:
    """Panels 2i (gate) and 2i + 1 (up) of the same columns."""
    rows = step[NUM_TOKENS]
    for unit in range(tile * op[GROUP] // 2, min((tile + 1) * op[GROUP], op[PANELS]) // 2):
        row = 0
        # The first column of the first panel lands at the start of the scratch memory.
        out = scratch - 4 * (2 * unit * PANEL)
        while row < rows:
            height = min(GATE_UP_ROWS, rows - row)
            _multiply(level, op, row, out, 2 * PANEL, height, 2 * unit, 2 * unit + 2, 0)
            for r in range(height):
                gate = scratch + 8 * PANEL * r
                at = (row + r) * op[LD_OUTPUT] + unit * PANEL
                if op[FORMAT] == INT8:
                    silu_mul(gate, gate + 4 * PANEL, PANEL, op[OUTPUT] + 4 * at)
                else:
                    silu_mul_bfloat16(gate, gate + 4 * PANEL, PANEL, op[OUTPUT] + 2 * at)
            row += height


@compiled
def _rotate_head(x: int, norm: int, dim: int, eps: Any, cos: int, sin: int, out: int) -> None:
    if norm != 0:
        rms_norm(x, norm, dim, eps, x)
    rotate(x, cos, sin, dim, out)


@compiled
def _rotate(kv: Any, op: Any, segment: int, kv_head: int, sizes: Any, eps: Any, scratch: int) -> None:
    """A segment's tokens, one kv head with its group of query heads."""
    dim, page_size, heads, kv_heads = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[HEADS], sizes[KV_HEADS]
    group = heads // kv_heads
    token, position = read_i64(segment), read_i64(segment + 8)
    count, table = read_i64(segment + 16), read_i64(segment + 24)
    for t in range(count):
        cos = sizes[COS] + 2 * dim * (position + t)
        sin = sizes[SIN] + 2 * dim * (position + t)
        row = op[INPUT] + 4 * (token + t) * op[LD_INPUT]
        # Queries are kept as [kv head, token, head of the group, dim]: a segment's rows are contiguous.
        queries = op[QUERIES] + 2 * dim * group * (kv_head * sizes[LD_QUERIES] + token + t)
        for g in range(group):
            _rotate_head(row + 4 * dim * (kv_head * group + g), op[Q_NORM], dim, eps, cos, sin, scratch)
            for i in range(0, dim, 16):
                store_bfloat16(queries + 2 * (g * dim + i), load(scratch + 4 * i))
        page = np.int64(load_i32(table + 4 * ((position + t) // page_size)))
        at = page_size * (page * kv_heads + kv_head)
        slot = (position + t) % page_size
        _rotate_head(row + 4 * dim * (heads + kv_head), op[K_NORM], dim, eps, cos, sin, scratch)
        value = row + 4 * dim * (heads + kv_heads + kv_head)
        room = scratch + 4 * dim
        if len(kv) == 1:
            write_key_int8(scratch, dim, op[KEYS] + dim * at, op[KEY_SCALES] + 4 * at, slot, room)
            write_value_int8(value, dim, op[VALUES] + dim * at, op[VALUE_SCALES] + 4 * at, slot, room)
        else:
            write_key(scratch, dim, op[KEYS] + 2 * dim * at, slot, room)
            write_value(value, dim, op[VALUES] + 2 * dim * at, slot)


@compiled
def _fetch_slots(kv: Any, op: Any, segment: int, sizes: Any) -> None:
    """Load what a token's keys and values are about to be written into: stores wait for one line after the other."""
    dim, page_size, kv_heads = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[KV_HEADS]
    position = read_i64(segment + 8)
    page, slot = np.int64(load_i32(read_i64(segment + 24) + 4 * (position // page_size))), position % page_size
    item = 1 if len(kv) == 1 else 2
    for kv_head in range(kv_heads):
        at = item * dim * page_size * (page * kv_heads + kv_head)
        fetch_lines(op[KEYS] + at + 16 * item * dim * (slot // 16), 16 * item * dim)
        fetch_lines(op[VALUES] + at + 4 * dim * (slot // (4 // item)), 4 * dim)


@compiled
def _attend(level: Any, kv: Any, op: Any, step: Any, sizes: Any, scale: Any, eps: Any, tile: int, scratch: int) -> None:
    """One kv head of a segment or, with many segments, all: what comes next is then known, and loaded ahead."""
    kv_heads = sizes[KV_HEADS]
    if step[SPANS] > 0:
        _attend_span(level, kv, op, step, sizes, scale, tile, scratch)
        return
    if step[NUM_SEGMENTS] >= WHOLE_SEGMENTS:
        if step[SINGLE]:
            _fetch_slots(kv, op, step[SEGMENTS] + 32 * tile, sizes)
        for kv_head in range(kv_heads):
            _attend_head(level, kv, op, step, sizes, scale, eps, tile, kv_head, kv_heads, scratch)
    else:
        kv_head = tile % kv_heads
        _attend_head(level, kv, op, step, sizes, scale, eps, tile // kv_heads, kv_head, kv_head + 1, scratch)


@compiled
def _attend_head(
    level: Any,
    kv: Any,
    op: Any,
    step: Any,
    sizes: Any,
    scale: Any,
    eps: Any,
    index: int,
    kv_head: int,
    end: int,
    scratch: int,
) -> None:
    dim, page_size, kv_heads = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[KV_HEADS]
    group = sizes[HEADS] // kv_heads
    segment = step[SEGMENTS] + 32 * index
    if step[SINGLE]:
        _rotate(kv, op, segment, kv_head, sizes, eps, scratch)
    token, position = read_i64(segment), read_i64(segment + 8)
    count, table = read_i64(segment + 16), read_i64(segment + 24)
    first = kv_head * page_size  # counted in tokens: page 0 of this head, and what is read after it
    following, item = 0, 1 if len(kv) == 1 else 2
    if op[WINDOW] == 0:
        if kv_head + 1 < end:
            following = op[KEYS] + item * dim * page_size * (kv_heads * load_i32(table) + kv_head + 1)
        elif kv_head > 0 and index + sizes[THREADS] < step[NUM_SEGMENTS]:  # most likely what this thread takes next
            following = read_i64(segment + 32 * sizes[THREADS] + 24)
            following = op[KEYS] + item * dim * page_size * kv_heads * load_i32(following)
    queries = op[QUERIES] + 2 * dim * group * (kv_head * sizes[LD_QUERIES] + token)
    if len(kv) == 1:
        rows = attend_int8(
            level,
            queries,
            count * group,
            group,
            position,
            op[WINDOW],
            scale,
            op[KEYS] + dim * first,
            op[VALUES] + dim * first,
            op[KEY_SCALES] + 4 * first,
            op[VALUE_SCALES] + 4 * first,
            table,
            kv_heads,
            page_size,
            dim,
            scratch,
            following,
        )
    else:
        rows = attend(
            level,
            queries,
            count * group,
            group,
            position,
            op[WINDOW],
            scale,
            op[KEYS] + 2 * dim * first,
            op[VALUES] + 2 * dim * first,
            table,
            2 * dim * kv_heads * page_size,
            page_size,
            dim,
            scratch,
            following,
        )
    _write_rows(op, rows, token, count, kv_head, group, dim)


@compiled
def _write_rows(op: Any, rows: int, token: int, count: int, kv_head: int, group: int, dim: int) -> None:
    """A kv head's float32 results [count * group, dim] in the next layer's input type."""
    for t in range(count):
        row, column = rows + 4 * t * group * dim, kv_head * group * dim
        at = (token + t) * op[LD_OUTPUT] + column
        if op[FORMAT] == INT8:  # only where heads are whole groups
            scales = op[SCALES] + 4 * ((token + t) * op[LD_SCALES] + column // INT8_GROUP * SCALE_WORDS)
            quantize_row(row, group * dim, group * dim, op[FACTORS] + 4 * column, op[OUTPUT] + at, scales)
        elif op[FORMAT] == FLOAT32:
            for i in range(0, group * dim, 16):
                store(op[OUTPUT] + 4 * (at + i), load(row + 4 * i))
        else:
            for i in range(0, group * dim, 16):
                store_bfloat16(op[OUTPUT] + 2 * (at + i), load(row + 4 * i))


@compiled
def _attend_span(level: Any, kv: Any, op: Any, step: Any, sizes: Any, scale: Any, tile: int, scratch: int) -> None:
    """One span of one kv head of a segment of one token, into the span's state."""
    dim, page_size, kv_heads, spans = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[KV_HEADS], step[SPANS]
    group = sizes[HEADS] // kv_heads
    span, kv_head = tile % spans, tile // spans % kv_heads
    segment = step[SEGMENTS] + 32 * (tile // spans // kv_heads)
    token, position, table = read_i64(segment), read_i64(segment + 8), read_i64(segment + 24)
    if span > position // SPAN or span < first_page(position, op[WINDOW], page_size) * page_size // SPAN:
        return
    first = kv_head * page_size
    queries = op[QUERIES] + 2 * dim * group * (kv_head * sizes[LD_QUERIES] + token)
    state = step[STATES] + tile * state_bytes(group, dim)
    until = min(position, (span + 1) * SPAN - 1)
    if len(kv) == 1:
        split_queries(queries, group, dim, scale, scratch)
        attend_span_int8(
            level,
            group,
            group,
            position,
            op[WINDOW],
            op[KEYS] + dim * first,
            op[VALUES] + dim * first,
            op[KEY_SCALES] + 4 * first,
            op[VALUE_SCALES] + 4 * first,
            table,
            kv_heads,
            page_size,
            dim,
            scratch,
            span,
            state,
            until,
            0,
        )
    else:
        attend_span(
            level,
            queries,
            group,
            group,
            position,
            op[WINDOW],
            scale,
            op[KEYS] + 2 * dim * first,
            op[VALUES] + 2 * dim * first,
            table,
            2 * dim * kv_heads * page_size,
            page_size,
            dim,
            scratch,
            span,
            state,
            until,
            0,
        )


@compiled
def _merge(level: Any, op: Any, step: Any, sizes: Any, tile: int) -> None:
    """The spans of one kv head of a segment."""
    dim, page_size, kv_heads, spans = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[KV_HEADS], step[SPANS]
    group = sizes[HEADS] // kv_heads
    kv_head = tile % kv_heads
    segment = step[SEGMENTS] + 32 * (tile // kv_heads)
    token, position = read_i64(segment), read_i64(segment + 8)
    size = state_bytes(group, dim)
    states = step[STATES] + tile * spans * size
    first = first_page(position, op[WINDOW], page_size) * page_size // SPAN
    whole = states + first * size
    for span in range(first + 1, position // SPAN + 1):
        merge_states(level, group, dim, whole, states + span * size)
    normalise(group, dim, whole)
    _write_rows(op, whole, token, 1, kv_head, group, dim)


@compiled
def _run_tile(operation: int, tile: int, thread: int, context: Any) -> None:
    operations, step, sizes, eps, scale, level, kv = context
    op = operations[operation]
    kind = op[KIND]
    scratch = sizes[SCRATCH] + thread * sizes[SCRATCH_BYTES]
    if kind == LINEAR:
        _linear(level, op, step, tile)
    elif kind == GATE_UP:
        _gate_up(level, op, step, tile, scratch)
    elif kind == ATTEND:
        _attend(level, kv, op, step, sizes, scale, eps, tile, scratch)
    elif kind == MERGE:
        _merge(level, op, step, sizes, tile)
    elif kind == ROTATE:
        segment = step[SEGMENTS] + 32 * tile
        for kv_head in range(sizes[KV_HEADS]):
            _rotate(kv, op, segment, kv_head, sizes, eps, scratch)
    elif kind == EMBED:
        _embed(op, step, sizes, tile)
    elif kind == QUANTISE:
        _quantise(op, step, tile)
    else:
        _norm(op, step, sizes, eps, tile, scratch)


_walk = make_walk(_run_tile)


@compiled
def run_step(
    header: int, records: int, operations: Any, step: Any, sizes: Any, eps: Any, scale: Any, level: Any, kv: Any
) -> None:
    """The leader: compute the step that ``step`` describes."""
    epoch = next_epoch(header)
    count = operations.shape[0]
    for i in range(count):
        set_operation(records + i * RECORD, epoch, _tiles(operations[i], step, sizes))
    start_step(header)
    _walk(records, count, epoch, 0, (operations, step, sizes, eps, scale, level, kv), step[STAMPS])


@compiled
def help_steps(
    header: int,
    thread: int,
    records: int,
    operations: Any,
    step: Any,
    sizes: Any,
    eps: Any,
    scale: Any,
    level: Any,
    kv: Any,
) -> None:
    """A helper, until the team is closed."""
    seen = 0
    context = (operations, step, sizes, eps, scale, level, kv)
    while True:
        seen = await_step(header, seen)
        if seen < 0:
            return
        _walk(records, operations.shape[0], seen, thread, context, 0)


@compiled
def plan_step(
    slots: Any, counts: Any, computed: Any, ids: Any, tables: Any, token_ids: Any, segments: Any, step: Any, sizes: Any
) -> int:
    """Write the step's token ids and segments: row i takes ``counts[i]`` tokens of slot ``slots[i]`` after
    ``computed[slot]``. ``ids`` int32 [slots, length], ``tables`` int32 [slots, pages]. Returns the number of tokens."""
    segment, token, longest, single = 0, 0, 0, True
    size = sizes[SEGMENT]
    for i in range(slots.shape[0]):
        slot, count = slots[i], counts[i]
        position = computed[slot]
        single = single and count == 1
        longest = max(longest, position + count)
        for t in range(count):
            token_ids[token + t] = ids[slot, position + t]
        done = 0
        while done < count:
            length = min(count - done, size - (position + done) % size)
            segments[segment, 0] = token + done
            segments[segment, 1] = position + done
            segments[segment, 2] = length
            segments[segment, 3] = tables.ctypes.data + 4 * slot * tables.shape[1]
            segment += 1
            done += length
        token += count
    few = sizes[THREADS] > 1 and segment * sizes[KV_HEADS] < TILES_EACH * sizes[THREADS]
    split = single and few and longest >= SPLIT_FROM
    step[SPANS] = (longest + SPAN - 1) // SPAN if split else 0
    step[NUM_TOKENS], step[NUM_SEGMENTS], step[SINGLE] = token, segment, 1 if single and not split else 0
    return token
