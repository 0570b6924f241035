"""Streamed text equals ``decode`` of all ids, for every kind of decoder."""

from __future__ import annotations

import random

import pytest
from tokenizer_world import byte_fallback_tokenizer, default_gguf, make_texts, settings_for
from tokenizers import AddedToken, Tokenizer, decoders, models

from ringserve.engine.detokenizer import DetokenizerFactory
from ringserve.engine.token_text import TokenText, byte_level_alphabet
from ringserve.engine.tokenizer_loader import load_tokenizer

DECODERS = {
    "byte-level": decoders.ByteLevel(),
    "byte-level in a sequence": decoders.Sequence([decoders.ByteLevel()]),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "byte fallback, metaspace": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    ),
    "strip each": decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse(), decoders.Strip("a", 3, 0)]),
    "fused metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()]),
    "word pieces (window)": decoders.WordPiece(),
    "suffixes (window)": decoders.BPEDecoder(),
}


def awkward_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """Every byte in both spellings, odd pieces, special and added tokens, and a hole in the ids."""
    rng = random.Random(1)
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*byte_level_alphabet(), "▁", "▁▁", "▁▁a", "##b", "a▁b", "end</w>", "<0xZZ>", "<0x4>"]
    pieces += ["".join(rng.choice("ab▁é中😀 ĠÃ©x") for _ in range(rng.randrange(1, 5))) for _ in range(200)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</é>")])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("中文")])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte -> id of its byte-level token."""
    return {byte: id_of(tokenizer, character) for character, byte in byte_level_alphabet().items()}


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Ids with runs of (cut) multi-byte characters and ids that stand for nothing."""
    characters = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "😀€é".encode()]
    levels = byte_ids(tokenizer)
    spelled = [levels[byte] for byte in "😀€é".encode()]
    ids: list[int] = []
    for _ in range(rng.randrange(30)):
        kind = rng.random()
        if kind < 0.3:
            ids += rng.choice([characters, spelled])[: rng.randrange(10)]
        else:
            ids.append(rng.randrange(tokenizer.get_vocab_size() + 2))
    return ids


@pytest.mark.parametrize("name", DECODERS)
def test_equals_decode_on_random_ids(name: str) -> None:
    tokenizer = awkward_tokenizer(DECODERS[name])
    factory = DetokenizerFactory(TokenText(tokenizer))
    rng = random.Random(2)
    for _ in range(600):
        ids = random_ids(tokenizer, rng)
        for skip in (True, False):
            detokenizer = factory.create(skip)
            text = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
            assert text == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("kind", ["default", "llama", "unigram"])
def test_real_text_streams_without_a_broken_character(kind: str) -> None:
    tokenizer = (
        load_tokenizer(settings_for(default_gguf())).backend if kind == "default" else byte_fallback_tokenizer(kind)
    )
    factory = DetokenizerFactory(TokenText(tokenizer))
    for text in make_texts(200):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        detokenizer = factory.create(skip_special_tokens=False)
        pieces = [*map(detokenizer.feed, ids), detokenizer.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
        if "�" not in text:
            assert not any("�" in piece for piece in pieces)


def test_incomplete_characters_are_held_and_flushed() -> None:
    tokenizer = awkward_tokenizer(decoders.ByteLevel())
    levels = byte_ids(tokenizer)
    detokenizer = DetokenizerFactory(TokenText(tokenizer)).create()
    first, *_, last = (levels[byte] for byte in "😀".encode())
    assert detokenizer.feed(first) == ""
    assert detokenizer.pending
    assert detokenizer.flush() == "�"
    detokenizer = DetokenizerFactory(TokenText(tokenizer)).create()
    assert [detokenizer.feed(levels[byte]) for byte in "😀".encode()] == ["", "", "", "😀"]
    assert not detokenizer.pending
    assert detokenizer.feed(last) == "�"


def test_a_run_of_byte_tokens_is_decided_as_a_whole() -> None:
    tokenizer = awkward_tokenizer(DECODERS["llama"])
    euro = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "€".encode()]
    detokenizer = DetokenizerFactory(TokenText(tokenizer)).create()
    assert [detokenizer.feed(token) for token in euro] == ["", "", ""]
    assert detokenizer.feed(euro[1]) == "����"  # the run can no longer be valid
    assert detokenizer.feed(euro[0]) == "�"
    assert detokenizer.feed(id_of(tokenizer, "x")) == "x"


@pytest.mark.parametrize("name", ["byte-level", "llama", "metaspace"])
def test_state_does_not_grow(name: str) -> None:
    """20,000 tokens that are never valid: DecodeStream needs half a minute for them."""
    tokenizer = awkward_tokenizer(DECODERS[name])
    levels = byte_ids(tokenizer)
    token = id_of(tokenizer, "<0xBF>") if name == "llama" else levels[0xBF]
    detokenizer = DetokenizerFactory(TokenText(tokenizer)).create()
    assert all(len(detokenizer.feed(token)) == 1 for _ in range(20_000))
    assert detokenizer.flush() == ""


def test_token_bytes_are_exact() -> None:
    text = TokenText(awkward_tokenizer(decoders.ByteLevel()))
    levels = byte_ids(text.backend)
    assert [text.raw(levels[byte]) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert text.text(levels[0xF0]) == "�"
    special = id_of(text.backend, "</é>")
    assert (text.text(special), text.raw(special)) == ("</é>", "</é>".encode())
    assert (text.vocabulary_string(10**6), text.raw(10**6), text.text(-1)) == (None, b"", "")
    text = TokenText(awkward_tokenizer(DECODERS["llama"]))
    assert text.raw(id_of(text.backend, "<0xF0>")) == b"\xf0"
    assert text.text(id_of(text.backend, "a▁b")) == "a b"


def test_token_bytes_join_to_the_text() -> None:
    tokenizer = load_tokenizer(settings_for(default_gguf())).backend
    tokens = TokenText(tokenizer)
    for text in make_texts(100):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(tokens.raw, ids)) == text.encode()
