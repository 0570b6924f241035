"""The GGUF header reader on good, damaged and hostile files."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path

import pytest
from gguf_writer import KINDS, array, gguf, scalar, string
from tokenizer_world import default_gguf

from ringserve.engine.gguf_header import GgufError, parse_gguf_metadata, read_gguf_metadata

PAIRS = {
    "name": struct.pack("<I", 8) + string("häß"),
    **{f"scalar.{letter}": scalar(letter, 1) for letter in KINDS},
    "negative": scalar("q", -5),
    "tokens": array(8, 3, string("a") + string("") + string("中")),
    "types": array(5, 4, struct.pack("<4i", 1, -2, 3, 4)),
    "flags": array(7, 2, b"\x01\x00"),
    "nested": array(9, 2, struct.pack("<IQ2B", 0, 2, 7, 8) + struct.pack("<IQ", 8, 1) + string("x")),
    "empty": array(8, 0, b""),
}


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_type(version: int) -> None:
    metadata = parse_gguf_metadata(gguf(PAIRS, version) + b"tensors follow")
    assert metadata["name"] == "häß"
    assert all(metadata[f"scalar.{letter}"] == 1 for letter in KINDS)
    assert metadata["negative"] == -5
    assert metadata["tokens"] == ["a", "", "中"]
    assert metadata["types"] == [1, -2, 3, 4]
    assert metadata["flags"] == [True, False]
    assert metadata["nested"] == [[7, 8], ["x"]]
    assert metadata["empty"] == []


def test_every_truncation_is_refused() -> None:
    whole = gguf(PAIRS)
    for size in range(len(whole)):
        with pytest.raises(GgufError):
            parse_gguf_metadata(whole[:size])


def test_damage_raises_nothing_but_gguf_error() -> None:
    whole = gguf(PAIRS)
    rng = random.Random(3)
    for _ in range(3_000):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(4, len(damaged))] = rng.choice([0, 1, 8, 9, 127, 255, rng.randrange(256)])
        with contextlib.suppress(GgufError):
            assert isinstance(parse_gguf_metadata(bytes(damaged)), dict)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (gguf({"a": array(8, 2**62, b"")}), "truncated"),
        (gguf({"a": array(4, 2**62, b"")}), "truncated"),
        (gguf({"a": struct.pack("<I", 77)}) + bytes(9), "unknown value type 77"),
        (gguf({"a": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50 + bytes(20)}), "nested"),
    ],
)
def test_says_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(GgufError, match=message):
        parse_gguf_metadata(data)


def test_reads_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(PAIRS))
    assert read_gguf_metadata(path)["name"] == "häß"
    path.write_bytes(b"")
    with pytest.raises(GgufError, match="empty"):
        read_gguf_metadata(path)


def test_reads_the_default_model() -> None:
    metadata = read_gguf_metadata(default_gguf())
    assert metadata["general.architecture"] == "llama"
    assert len(metadata["tokenizer.ggml.tokens"]) == 49_152
    assert "im_start" in metadata["tokenizer.chat_template"]
