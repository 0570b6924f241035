"""What single tokens look like: vocabulary strings, readable text and exact bytes.

Wraps a ``tokenizers.Tokenizer``; every lookup is cached, since the same few thousand tokens make up most output.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from tokenizers import Tokenizer

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How byte-fallback vocabularies spell a raw byte."""
_METASPACE: Final = "▁"


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the others follow at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def decoder_steps(backend: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's description (tokenizer.json's ``decoder``), nested sequences flattened; empty without a decoder."""
    # Through the decoder's own pickling, since to_str() of the whole tokenizer writes megabytes of vocabulary.
    decoder = backend.decoder
    if decoder is None:
        return []
    steps: list[dict[str, Any]] = []
    waiting = [json.loads(decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step["decoders"], *waiting]
        else:
            steps.append(step)
    return steps


class TokenText:
    """Strings and bytes of a vocabulary's tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.steps = decoder_steps(backend)
        kinds = {step["type"] for step in self.steps}
        self._alphabet = byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._strings: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def vocabulary_string(self, token_id: int) -> str | None:
        """The vocabulary's spelling (``Ġworld``, ``▁world``, ``<0x0A>``); None if the id stands for nothing."""
        try:
            return self._strings[token_id]
        except KeyError:
            # Ids travel as int32; what lies outside uint32 would raise in the library.
            string = self.backend.id_to_token(token_id) if token_id >= 0 else None
            self._strings[token_id] = string
            return string

    def raw(self, token_id: int) -> bytes:
        """The token's exact bytes, even where they are only a part of a character; empty for unknown ids."""
        try:
            return self._bytes[token_id]
        except KeyError:
            value = self._bytes[token_id] = self._make_bytes(token_id)
            return value

    def text(self, token_id: int) -> str:
        """The token alone as text; incomplete characters become U+FFFD."""
        try:
            return self._texts[token_id]
        except KeyError:
            value = self._texts[token_id] = self.raw(token_id).decode("utf-8", "replace")
            return value

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.vocabulary_string(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            return byte_level_bytes(token, self._alphabet)
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(_METASPACE, " ").encode()

    def longest_token(self) -> int:
        """Characters of the longest vocabulary string: no token stands for more characters of a prompt."""
        return max((len(token) for token in self.backend.get_vocab(with_added_tokens=True)), default=1)


def byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """The bytes of a byte-level token; a token with a foreign character stands for its own UTF-8 bytes."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()
