"""One linear layer computed by a team of threads: for callers that come with a layer at a time.

A call is described by an int64 array of ``CALL_FIELDS`` numbers (addresses, sizes in elements). bfloat16 inputs are
read where they are; int8 ones are float32 and quantised first, rows in tiles. Then come the panels of the layer in
tiles, as in ``decoder.py``. Threads share the tiles out as ``team.py`` says: one that the operating system has put
aside holds up nobody, and a call by a team of one makes no system call.
"""

from __future__ import annotations

from typing import Any

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.linear_bf16 import bf16_block
from ringserve.kernels.cpu.linear_int8 import int8_block
from ringserve.kernels.cpu.quantize import quantize_row
from ringserve.kernels.cpu.team import RECORD, await_step, make_walk, next_epoch, set_operation, start_step

# Of every layer.
INT8, WEIGHT, BIAS, K, K_PAD, COLUMNS, PANELS, PANELS_EACH = range(8)
# Of an int8 layer; VALUES and WORDS: room for the quantised input.
WEIGHT_SCALES, FACTORS, VALUES, WORDS, LD_WORDS = range(8, 13)
# Of a call.
INPUT, LD_INPUT, OUTPUT, LD_OUTPUT, ROWS = range(13, 18)
CALL_FIELDS = 24

QUANTISE, MULTIPLY = 0, 1
OPERATIONS = 2
TILE_ROWS = 8
"""Rows that a thread quantises at once."""


@compiled
def _run_tile(operation: int, tile: int, thread: int, context: Any) -> None:
    call, level = context
    if operation == QUANTISE:
        for row in range(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, call[ROWS])):
            x, q = call[INPUT] + 4 * row * call[LD_INPUT], call[VALUES] + row * call[K_PAD]
            quantize_row(x, call[K], call[K_PAD], call[FACTORS], q, call[WORDS] + 4 * row * call[LD_WORDS])
        return
    first = tile * call[PANELS_EACH]
    last = min(first + call[PANELS_EACH], call[PANELS])
    if call[INT8] != 0:
        int8_block(
            level, call[WEIGHT], call[WEIGHT_SCALES], call[BIAS], call[VALUES], call[K_PAD], call[WORDS],
            call[LD_WORDS], call[K_PAD], call[OUTPUT], call[LD_OUTPUT], call[ROWS], call[COLUMNS], first, last, 0,
        )  # fmt: skip
    else:
        bf16_block(
            level, call[WEIGHT], call[BIAS], call[INPUT], call[LD_INPUT], call[K_PAD], call[OUTPUT], call[LD_OUTPUT],
            call[ROWS], call[COLUMNS], first, last, 0,
        )  # fmt: skip


_walk = make_walk(_run_tile)


@compiled
def run_call(header: int, records: int, call: Any, level: Any) -> None:
    """The leader: compute what ``call`` describes."""
    epoch = next_epoch(header)
    rows = call[ROWS]
    quantised = (rows + TILE_ROWS - 1) // TILE_ROWS if call[INT8] != 0 else 0
    set_operation(records, epoch, quantised)
    tiles = (call[PANELS] + call[PANELS_EACH] - 1) // call[PANELS_EACH] if rows > 0 else 0
    set_operation(records + RECORD, epoch, tiles)
    start_step(header)
    _walk(records, OPERATIONS, epoch, 0, (call, level), 0)


@compiled
def help_calls(header: int, thread: int, records: int, call: Any, level: Any) -> None:
    """A helper, until the team is closed."""
    seen = 0
    while True:
        seen = await_step(header, seen)
        if seen < 0:
            return
        _walk(records, OPERATIONS, seen, thread, (call, level), 0)
