"""The fast path on CPUs: a decoder's whole step as one call of compiled code for each thread.

Holds the packed weights, the activations' buffers and the team of threads, and makes the list of operations that
``kernels/cpu/decoder.py`` walks through. Everything is prepared at start; a step fills in token ids and segments.
Buffers grow when a step is larger than any before.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.decoder_weights import DecoderWeights, LayerWeights, Linear
from ringserve.engine.kv_layout import KVDType
from ringserve.kernels.cpu import decoder_fields as k
from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.attention_inputs import MAX_ROWS
from ringserve.kernels.cpu.attention_spans import state_bytes
from ringserve.kernels.cpu.decoder import help_steps, plan_step, run_step
from ringserve.kernels.cpu.features import Level
from ringserve.kernels.cpu.linear_bf16 import PANEL, padded
from ringserve.kernels.cpu.paged_attention import LOG2_E, scratch_bytes
from ringserve.kernels.cpu.paged_attention_int8 import scratch_bytes_int8
from ringserve.kernels.cpu.quantize import GROUP as INT8_GROUP
from ringserve.kernels.cpu.quantize import SCALE_WORDS
from ringserve.kernels.cpu.team import RECORD, STOP, Team

KV_STORAGE: dict[KVDType, k.KVStorage] = {"bfloat16": k.KV_BFLOAT16, "int8": k.KV_INT8}
"""What the pool's types are to compiled code. It knows no others."""
HEAD_GROUP = 4
"""Panels of the output layer that a thread takes at once; of other layers one (or one of gate and one of up)."""


def row_stride(elements: int, item_size: int) -> int:
    """Elements from row to row: whole cache lines, and no multiple of 4096 bytes, which would make all rows compete for
    the same places in the cache."""
    line = 64 // item_size
    stride = -(-elements // line) * line
    return stride + line if stride * item_size % 4096 == 0 else stride


def segment_length(group: int) -> int:
    """Tokens of a segment: even, and no more query rows than one call of attention takes."""
    return max(2, min(16, MAX_ROWS // group // 2 * 2))


class Pages(Protocol):
    """A KV pool, as compiled code sees it."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def dtype(self) -> KVDType:
        """Of keys and values."""

    def addresses(self, index: int) -> tuple[int, ...]:
        """Where a layer's keys and values (and their scales) begin."""


def _addresses(pool: Pages, layer: int) -> dict[str, int]:
    """Where a layer's keys and values lie."""
    names = ("KEYS", "VALUES", "KEY_SCALES", "VALUE_SCALES")
    return dict(zip(names, pool.addresses(layer), strict=False))


class FastDecoder:
    """A decoder on the fast path. Not thread-safe: one caller, which is the team's leader."""

    def __init__(
        self,
        weights: DecoderWeights,
        pool: Pages,
        windows: list[int],
        num_threads: int,
        level: Level,
        max_tokens: int,
        max_positions: int,
    ) -> None:
        """``pool``: of bfloat16 or int8, pages of 16 tokens and more; ``max_tokens``: of an ordinary step;
        ``max_positions``: of the longest sequence, since compiled code looks them up without a check."""
        shape = weights.shape
        page_size = pool.page_size
        self._weights, self._windows = weights, windows
        self.level, self.kv_dtype = level, pool.dtype
        """Which version of the compiled code it is."""
        self._pool = pool  # compiled code knows addresses only: whoever computes keeps the memory
        kv = KV_STORAGE[pool.dtype]
        self._pages = [_addresses(pool, index) for index in range(shape.layers)]
        self._shape, self._page_size = shape, page_size
        self._cos, self._sin = weights.rotary.tables(max_positions)
        self._int8 = weights.layers[0].down.int8
        self._group = shape.heads // shape.kv_heads
        self._step = np.zeros(k.STEP_FIELDS, np.int64)
        self._sizes = np.zeros(k.SIZE_FIELDS, np.int64)
        self._capacity = 0
        self._buffers: dict[str, NDArray[Any]] = {}
        self._logits: NDArray[np.float32] = np.zeros((0, padded(shape.vocab_size)), np.float32)
        self._best: NDArray[np.int64] = np.zeros(0, np.int64)
        self._head_tiles = -(-padded(shape.vocab_size) // (PANEL * HEAD_GROUP))
        self._stamps: NDArray[np.int64] | None = None
        self._states: NDArray[np.uint8] = np.zeros(0, np.uint8)
        count = 3 + 10 * shape.layers if self._int8 else 3 + 9 * shape.layers
        if self._int8 and not self._heads_are_groups:
            count += shape.layers
        if weights.exact_head is not None:
            count += 1
        self._operations = np.zeros((count, k.FIELDS), np.int64)
        self._records = aligned_zeros((count * RECORD,), np.uint8)
        attention = scratch_bytes_int8 if kv == k.KV_INT8 else scratch_bytes
        scratch = max(attention(shape.head_dim, page_size), k.GATE_UP_ROWS * 2 * PANEL * 4, 4 * shape.hidden)
        scratch = -(-scratch // 4096) * 4096 + 4096
        self._scratch = aligned_zeros((num_threads * scratch,), np.uint8)
        for field, value in (
            (k.HIDDEN, shape.hidden),
            (k.HEADS, shape.heads),
            (k.KV_HEADS, shape.kv_heads),
            (k.HEAD_DIM, shape.head_dim),
            (k.PAGE_SIZE, page_size),
            (k.COS, self._cos.ctypes.data),
            (k.SIN, self._sin.ctypes.data),
            (k.SCRATCH, self._scratch.ctypes.data),
            (k.SCRATCH_BYTES, scratch),
            (k.SEGMENT, segment_length(self._group)),
            (k.THREADS, num_threads),
            (k.HEAD_TILES, self._head_tiles),
        ):
            self._sizes[field] = value
        self._grow(max_tokens)
        self._fixed = (
            self._records.ctypes.data,
            self._operations,
            self._step,
            self._sizes,
            np.float32(shape.eps),
            np.float32(shape.scale * LOG2_E),
            level,
            kv,
        )
        if num_threads > 1:  # compiled here, not by the thread that is needed
            stopped = np.zeros(8, np.int64)
            stopped[STOP // 8] = 1
            help_steps(stopped.ctypes.data, 1, *self._fixed)
        self._team = Team(num_threads, lambda header, thread: help_steps(header, thread, *self._fixed))

    @property
    def num_threads(self) -> int:
        """The team's size, the caller included."""
        return self._team.num_threads

    def close(self) -> None:
        """End the helper threads."""
        self._team.close()

    def forward(
        self,
        slots: NDArray[np.int32],
        counts: NDArray[np.int32],
        computed: NDArray[np.int64],
        ids: NDArray[np.int32],
        tables: NDArray[np.int32],
        wanted: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Compute ``counts[i]`` tokens of slot ``slots[i]`` after ``computed[slot]``, for each i.

        ``ids`` [slots, length]: token ids; ``tables`` [slots, pages]: block tables. ``wanted``: tokens of the step, in
        the order of its rows, whose logits are returned, float32 [len(wanted), vocab_size]; the next step overwrites
        them.
        """
        # Compiled code is specialised by the arrays' flags too: those of messages cannot be written to.
        slots, counts = slots.copy(), counts.copy()
        total = int(np.add.reduce(counts))
        self._make_room(total, len(slots) + total, len(wanted))
        step, logits = self._step, self._logits[: len(wanted), : self._shape.vocab_size]
        token_ids, segments = self._buffers["token_ids"], self._buffers["segments"]
        plan_step(slots, counts, computed, ids, tables, token_ids, segments, step, self._sizes)
        step[k.NUM_WANTED] = len(wanted)
        self._buffers["wanted"][: len(wanted)] = wanted
        if step[k.SPANS]:
            step[k.STATES] = self._room_for_states(int(step[k.NUM_SEGMENTS] * step[k.SPANS]))
        run_step(self._team.header, *self._fixed)
        return logits

    def best_tokens(self) -> list[int]:
        """The column of the largest logit in each row of the last step, as ``argmax`` finds it."""
        columns: list[int] = self._best[: self._step[k.NUM_WANTED]].tolist()
        return columns

    def set_windows(self, windows: list[int]) -> None:
        """Other sliding windows, for a check that must see them at work."""
        self._windows = windows
        self._make_operations()

    def record_times(self) -> None:
        """From now on, keep the time stamps of each step's operations."""
        self._stamps = np.zeros(len(self._operations) + 1, np.int64)
        self._step[k.STAMPS] = self._stamps.ctypes.data

    def operation_times(self) -> list[tuple[str, int, int]]:
        """(kind, index of the operation, clock ticks) of the last step. Needs ``record_times``."""
        if self._stamps is None:
            raise RuntimeError("record_times was not called")
        ticks = np.diff(self._stamps).tolist()
        kinds = [k.KIND_NAMES[kind] for kind in self._operations[:, k.KIND]]
        return [(kind, index, tick) for index, (kind, tick) in enumerate(zip(kinds, ticks, strict=True))]

    @property
    def _heads_are_groups(self) -> bool:
        """Whether a head's outputs can be quantised as soon as they are computed."""
        return self._shape.head_dim % INT8_GROUP == 0

    def _make_room(self, tokens: int, segments: int, rows: int) -> None:
        """For a step of so many tokens and segments, ``rows`` of logits among them. What a step reads at an address
        that it is told is told here, where it moves, and not at every step."""
        step = self._step
        if tokens > self._capacity:
            self._grow(tokens)
        if segments > len(self._buffers["segments"]):
            self._buffers["segments"] = np.zeros((2 * segments, 4), np.int64)
            step[k.SEGMENTS] = self._buffers["segments"].ctypes.data
        if rows > len(self._logits):
            columns = row_stride(padded(self._shape.vocab_size), 4)
            self._logits = aligned_zeros((-(-rows // 8) * 8, columns), np.float32)
            self._best = aligned_zeros((self._head_tiles * len(self._logits),), np.int64)
            step[k.LOGITS], step[k.LD_LOGITS] = self._logits.ctypes.data, columns
            step[k.BEST] = self._best.ctypes.data

    def _room_for_states(self, spans: int) -> int:
        """The address of memory for the states of all heads in so many spans."""
        shape = self._shape
        size = spans * shape.kv_heads * state_bytes(self._group, shape.head_dim)
        if size > len(self._states):
            self._states = aligned_zeros((2 * size,), np.uint8)
        return self._states.ctypes.data

    def _grow(self, tokens: int) -> None:
        """Make room for steps of so many tokens."""
        shape = self._shape
        intermediate = shape.hidden, padded(shape.intermediate)
        attention = shape.heads * shape.head_dim
        self._capacity = tokens = max(tokens, 16)
        buffers: dict[str, NDArray[Any]] = {
            "token_ids": np.zeros(tokens, np.int32),
            "wanted": np.zeros(tokens, np.int32),
            "segments": np.zeros((2 * tokens + 16, 4), np.int64),
            "queries": aligned_zeros((attention * tokens,), np.uint16),
            "x": aligned_zeros((tokens, row_stride(shape.hidden, 4)), np.float32),
            "qkv": aligned_zeros((tokens, row_stride(shape.qkv_columns, 4)), np.float32),
        }
        for name, size in (("normed", intermediate[0]), ("attended", attention), ("activated", intermediate[1])):
            if self._int8:
                groups = -(-size // INT8_GROUP)
                buffers[name] = aligned_zeros((tokens, row_stride(groups * INT8_GROUP, 1)), np.int8)
                buffers[name + " scales"] = aligned_zeros((tokens, row_stride(groups * SCALE_WORDS, 4)), np.uint32)
                if name != "normed":
                    buffers[name + " float"] = aligned_zeros((tokens, row_stride(size, 4)), np.float32)
            else:
                buffers[name] = aligned_zeros((tokens, row_stride(size + 7, 2)), np.uint16)
        self._buffers = buffers
        for field, name in ((k.TOKEN_IDS, "token_ids"), (k.SEGMENTS, "segments"), (k.WANTED, "wanted")):
            self._step[field] = buffers[name].ctypes.data
        self._sizes[k.LD_QUERIES] = tokens
        self._make_operations()

    def _make_operations(self) -> None:
        self._operations[:] = 0
        weights, buffers = self._weights, self._buffers
        maker = _Operations(self._operations, buffers)
        maker.add(k.EMBED, WEIGHT=weights.embedding.ctypes.data, **maker.output("x"))
        for index, layer in enumerate(weights.layers):
            self._add_layer(maker, index, layer)
        maker.add(
            k.PICK,
            WEIGHT=weights.norm.ctypes.data,
            ROWS_OF=k.WANTED_ROWS,
            K_PAD=weights.head.k_pad,
            **maker.plain_input("x"),
            **maker.packed_output("normed", weights.head),
        )
        maker.add(k.LINEAR, GROUP=HEAD_GROUP, ROWS_OF=k.WANTED_ROWS, **maker.layer(weights.head, "normed"))
        if weights.exact_head is not None:
            maker.add(
                k.RESCORE,
                WEIGHT=weights.norm.ctypes.data,
                EXACT_WEIGHT=weights.exact_head.ctypes.data,
                BIAS=weights.head.bias.ctypes.data,
                COLUMNS=weights.head.n,
                GROUP=HEAD_GROUP,
                ROWS_OF=k.WANTED_ROWS,
                **maker.plain_input("x"),
            )
        assert maker.count == len(self._operations)

    def _add_layer(self, maker: _Operations, index: int, layer: LayerWeights) -> None:
        maker.add(
            k.NORM,
            WEIGHT=layer.input_norm.ctypes.data,
            K_PAD=layer.qkv.k_pad,
            **maker.plain_input("x"),
            **maker.packed_output("normed", layer.qkv),
        )
        maker.add(k.LINEAR, GROUP=1, **maker.layer(layer.qkv, "normed"), **maker.output("qkv"))
        attention = {
            **self._pages[index],
            "WINDOW": self._windows[index],
            "Q_NORM": 0 if layer.q_norm is None else layer.q_norm.ctypes.data,
            "K_NORM": 0 if layer.k_norm is None else layer.k_norm.ctypes.data,
            "QUERIES": self._buffers["queries"].ctypes.data,
            **maker.plain_input("qkv"),
        }
        maker.add(k.ROTATE, **attention)
        if self._int8 and not self._heads_are_groups:
            attention |= {"FORMAT": k.FLOAT32, **maker.output("attended float")}
            maker.add(k.ATTEND, **attention)
            maker.add(k.MERGE, **attention)
            maker.add_quantise("attended", layer.output)
        else:
            attention |= maker.packed_output("attended", layer.output)
            maker.add(k.ATTEND, **attention)
            maker.add(k.MERGE, **attention)
        maker.add(k.LINEAR, GROUP=1, ADD=1, **maker.layer(layer.output, "attended"), **maker.output("x"))
        maker.add(
            k.NORM,
            WEIGHT=layer.mlp_norm.ctypes.data,
            K_PAD=layer.gate_up.k_pad,
            **maker.plain_input("x"),
            **maker.packed_output("normed", layer.gate_up),
        )
        activated = "activated float" if self._int8 else "activated"
        maker.add(k.GATE_UP, GROUP=2, **maker.layer(layer.gate_up, "normed"), **maker.output(activated))
        if self._int8:
            maker.add_quantise("activated", layer.down)
        maker.add(k.LINEAR, GROUP=1, ADD=1, **maker.layer(layer.down, "activated"), **maker.output("x"))


class _Operations:
    """Fills the table of operations row by row."""

    def __init__(self, table: NDArray[np.int64], buffers: dict[str, NDArray[Any]]) -> None:
        self._table, self._buffers = table, buffers
        self.count = 0

    def add(self, kind: int, **fields: int) -> None:
        """One operation; fields by the names of their columns."""
        row = self._table[self.count]
        row[k.KIND] = kind
        for name, value in fields.items():
            row[getattr(k, name)] = value
        self.count += 1

    def plain_input(self, name: str) -> dict[str, int]:
        """A float32 buffer to read."""
        buffer = self._buffers[name]
        return {"INPUT": buffer.ctypes.data, "LD_INPUT": buffer.shape[1]}

    def output(self, name: str) -> dict[str, int]:
        """A buffer to write."""
        buffer = self._buffers[name]
        return {"OUTPUT": buffer.ctypes.data, "LD_OUTPUT": buffer.shape[1]}

    def packed_output(self, name: str, reader: Linear) -> dict[str, int]:
        """A buffer that a linear layer reads: bfloat16, or int8 with scales."""
        fields = self.output(name)
        if reader.factors is not None:
            scales = self._buffers[name + " scales"]
            fields |= {
                "FORMAT": k.INT8,
                "SCALES": scales.ctypes.data,
                "LD_SCALES": scales.shape[1],
                "FACTORS": reader.factors.ctypes.data,
            }
        return fields

    def layer(self, linear: Linear, name: str) -> dict[str, int]:
        """A linear layer and its input."""
        fields = self.plain_input(name)
        fields |= {
            "WEIGHT": linear.weight.ctypes.data,
            "BIAS": linear.bias.ctypes.data,
            "K_PAD": linear.k_pad,
            "COLUMNS": linear.n,
            "PANELS": padded(linear.n) // PANEL,
        }
        if linear.scales is not None:
            scales = self._buffers[name + " scales"]
            fields |= {
                "FORMAT": k.INT8,
                "SCALES": scales.ctypes.data,
                "LD_SCALES": scales.shape[1],
                "WEIGHT_SCALES": linear.scales.ctypes.data,
            }
        return fields

    def add_quantise(self, name: str, reader: Linear) -> None:
        """From the float32 buffer of ``name`` to the one that the next layer reads."""
        fields = self.plain_input(name + " float") | self.packed_output(name, reader)
        self.add(k.QUANTISE, COLUMNS=reader.k, K_PAD=reader.k_pad, **fields)
