"""One step of a decoder of the Llama family: a list of operations that a team of threads walks through.

``decoder_fields`` describes the operations, ``decoder_attention`` has those of attention. This module knows no request:
slots, sampling and budgets are the caller's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from ringserve.kernels.cpu.activation import silu_mul, silu_mul_bfloat16
from ringserve.kernels.cpu.attention_spans import SPAN
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.decoder_attention import attend_tile, merge_tile, rotate_segment
from ringserve.kernels.cpu.decoder_fields import (
    ADD,
    ATTEND,
    BEST,
    BIAS,
    COLUMNS,
    EMBED,
    EMBED_ROWS,
    EXACT_WEIGHT,
    FACTORS,
    FORMAT,
    GATE_UP,
    GATE_UP_ROWS,
    GROUP,
    HEAD_TILES,
    HIDDEN,
    INPUT,
    INT8,
    K_PAD,
    KIND,
    KV_HEADS,
    LD_INPUT,
    LD_LOGITS,
    LD_OUTPUT,
    LD_SCALES,
    LINEAR,
    LOGITS,
    MERGE,
    NORM,
    NORM_ROWS,
    NUM_SEGMENTS,
    NUM_TOKENS,
    NUM_WANTED,
    OUTPUT,
    PANELS,
    PICK,
    QUANTISE,
    RESCORE,
    ROTATE,
    ROWS_OF,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    SEGMENT,
    SEGMENTS,
    SINGLE,
    SPANS,
    SPLIT_FROM,
    STAMPS,
    THREADS,
    TILES_EACH,
    TOKEN_IDS,
    WANTED,
    WANTED_ROWS,
    WEIGHT,
    WEIGHT_SCALES,
    WHOLE_SEGMENTS,
)
from ringserve.kernels.cpu.linear_bf16 import PANEL, bf16_block
from ringserve.kernels.cpu.linear_int8 import int8_block
from ringserve.kernels.cpu.llvm import load_i32, load_i64, store_i64
from ringserve.kernels.cpu.norm import rms_norm, rms_norm_bfloat16
from ringserve.kernels.cpu.quantize import quantize_row
from ringserve.kernels.cpu.rescore import rescore_row
from ringserve.kernels.cpu.row_best import best_key, key_columns
from ringserve.kernels.cpu.team import RECORD, await_step, make_walk, next_epoch, set_operation, start_step
from ringserve.kernels.cpu.vector_memory import load_bfloat16, store


@register_jitable
def _blocks(n: Any, size: Any) -> Any:
    return (n + size - 1) // size


@register_jitable
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
    if kind == RESCORE:
        return rows
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
            store_i64(step[BEST] + 8 * (tile * rows + row), key)
    else:
        _multiply(level, op, 0, op[OUTPUT], op[LD_OUTPUT], step[NUM_TOKENS], first, last, op[ADD])


@compiled
def _rescore(op: Any, step: Any, sizes: Any, eps: Any, row: int, scratch: int) -> None:
    hidden, token = sizes[HIDDEN], np.int64(load_i32(step[WANTED] + 4 * row))
    rms_norm(op[INPUT] + 4 * token * op[LD_INPUT], op[WEIGHT], hidden, eps, scratch)
    logits, best = step[LOGITS] + 4 * row * step[LD_LOGITS], step[BEST] + 8 * row
    rescore_row(
        scratch, op[EXACT_WEIGHT], op[BIAS], hidden, logits, op[COLUMNS], op[GROUP] * PANEL, best, step[NUM_WANTED]
    )


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
        attend_tile(level, kv, op, step, sizes, scale, eps, tile, scratch)
    elif kind == MERGE:
        merge_tile(level, op, step, sizes, tile)
    elif kind == ROTATE:
        segment = step[SEGMENTS] + 32 * tile
        for kv_head in range(sizes[KV_HEADS]):
            rotate_segment(kv, op, segment, kv_head, sizes, eps, scratch)
    elif kind == EMBED:
        _embed(op, step, sizes, tile)
    elif kind == QUANTISE:
        _quantise(op, step, tile)
    elif kind == RESCORE:
        _rescore(op, step, sizes, eps, tile, scratch)
    else:
        _norm(op, step, sizes, eps, tile, scratch)


@compiled
def _choose_best(best: int, rows: int, tiles: int) -> None:
    """The column of each row's largest key, over its first key. ``best``: int64 [tiles, rows]."""
    for tile in range(1, tiles):
        for row in range(rows):
            key = load_i64(best + 8 * (tile * rows + row))
            if key > load_i64(best + 8 * row):
                store_i64(best + 8 * row, key)
    for row in range(rows):
        store_i64(best + 8 * row, key_columns(load_i64(best + 8 * row)))


_walk = make_walk(_run_tile)


@compiled
def run_step(
    header: int, records: int, operations: Any, step: Any, sizes: Any, eps: Any, scale: Any, level: Any, kv: Any
) -> None:
    """The leader: compute the step that ``step`` describes. The first numbers in BEST are then the columns of the
    largest logits, one for each row wanted."""
    epoch = next_epoch(header)
    count = operations.shape[0]
    for i in range(count):
        set_operation(records + i * RECORD, epoch, _tiles(operations[i], step, sizes))
    start_step(header)
    _walk(records, count, epoch, 0, (operations, step, sizes, eps, scale, level, kv), step[STAMPS])
    _choose_best(step[BEST], step[NUM_WANTED], sizes[HEAD_TILES])


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
