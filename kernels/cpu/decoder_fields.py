"""The numbers that describe a decoder's step to compiled code: operations, what changes from step to step, sizes.

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
    RESCORE  the largest logits of those rows, computed anew from x[row] (``rescore``); after an output layer in int8

A segment is at most ``SEGMENT`` neighbouring tokens of one sequence, cut at multiples of that number: int64
[first token of the step, first position, tokens, address of the block table (int32)].

``kv`` says how pages are stored: KV_BFLOAT16 (``kv_pages``) or KV_INT8 (``kv_pages_int8``). It is a tuple whose type
compiled functions are specialised by, as a level is (``features``): what is not used is not compiled.
"""

from __future__ import annotations

from typing import Final

from ringserve.kernels.cpu.attention_spans import SPAN

# Kinds of operations.
EMBED, NORM, LINEAR, GATE_UP, ROTATE, ATTEND, QUANTISE, PICK, MERGE, RESCORE = range(10)
KIND_NAMES = ("embed", "norm", "linear", "gate_up", "rotate", "attend", "quantise", "pick", "merge", "rescore")

# Columns of an operation.
KIND, INPUT, LD_INPUT, OUTPUT, LD_OUTPUT, WEIGHT, BIAS, K_PAD, COLUMNS, PANELS, GROUP, ADD, ROWS_OF = range(13)
KEYS, VALUES, WINDOW, Q_NORM, K_NORM, QUERIES = range(13, 19)
FORMAT, SCALES, LD_SCALES, WEIGHT_SCALES, FACTORS = range(19, 24)
KEY_SCALES, VALUE_SCALES, EXACT_WEIGHT = range(24, 27)
FIELDS = 27

# FORMAT: of a linear layer's weights and input; SCALES: of that input, or of what an operation writes. FACTORS: of the
# layer that reads what an operation writes. EXACT_WEIGHT: of RESCORE, the output layer's in bfloat16, row after row.
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
THREADS, HEAD_TILES = 11, 12  # HEAD_TILES: of the output layer, one key in BEST for each and each row
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
