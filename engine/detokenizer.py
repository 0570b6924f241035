"""Token ids to text, one token at a time, never half a character.

The pieces of text given out, joined, equal ``tokenizer.decode(all ids)``. The library's decoder is a chain of steps
described in ``tokenizer.json``; each step that the vocabularies of language models use has a streaming twin here with
O(1) work and memory per token:

* ``ByteLevel``: an incremental UTF-8 decoder (what is no UTF-8 becomes U+FFFD once per maximal part, as there).
* ``ByteFallback``: the library decides about a *run* of byte tokens as a whole: valid UTF-8 is text, otherwise each
  byte of the run is one U+FFFD. So a run is held back until it ends or can no longer be valid.
* ``Replace``, ``Fuse``, ``Strip``, ``Metaspace``: by piece, with the start of the text remembered.

Any other chain (WordPiece, CTC ...) falls back on decoding a window of the last tokens twice, as vLLM and TGI do; there
equality holds for the spacing rules that look back one token. ``tokenizers.decoders.DecodeStream`` is not used: it
decodes its whole window again for every token of a run of invalid bytes (20,000 such tokens took 32 s).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, Final, Protocol

from ringserve.engine.token_text import BYTE_TOKEN, TokenText, byte_level_alphabet, byte_level_bytes

REPLACEMENT: Final = "�"
_MAX_WINDOW: Final = 16
"""Tokens the window decoder waits for an incomplete character: none has more than four bytes."""


class _Step(Protocol):
    """One step of a decoder chain: pieces in, pieces out."""

    def feed(self, pieces: list[str]) -> list[str]: ...

    def flush(self) -> list[str]: ...

    @property
    def pending(self) -> bool: ...


class _Stateless:
    """A step with nothing to flush."""

    __slots__ = ()

    def flush(self) -> list[str]:
        return []

    @property
    def pending(self) -> bool:
        return False


class _ByteLevel:
    __slots__ = ("_alphabet", "_decoder")

    def __init__(self, alphabet: dict[str, int]) -> None:
        self._alphabet = alphabet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, pieces: list[str]) -> list[str]:
        return [self._decoder.decode(b"".join([byte_level_bytes(piece, self._alphabet) for piece in pieces]))]

    def flush(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]

    @property
    def pending(self) -> bool:
        return bool(self._decoder.getstate()[0])


class _ByteFallback:
    __slots__ = ("_decoder", "_run", "_valid")

    def __init__(self) -> None:
        self._run = bytearray()
        self._valid = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def feed(self, pieces: list[str]) -> list[str]:
        out: list[str] = []
        for piece in pieces:
            match = BYTE_TOKEN.fullmatch(piece)
            if match is None:
                out += self.flush()
                out.append(piece)
                continue
            byte = bytes([int(match[1], 16)])
            if self._valid:
                self._run += byte
                try:
                    self._decoder.decode(byte)
                except UnicodeDecodeError:
                    self._valid = False
                    out += [REPLACEMENT] * len(self._run)
            else:
                out.append(REPLACEMENT)
        return out

    def flush(self) -> list[str]:
        run, valid = bytes(self._run), self._valid
        self._run.clear()
        self._valid = True
        self._decoder.reset()
        if not run or not valid:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:  # ends within a character
            return [REPLACEMENT] * len(run)

    @property
    def pending(self) -> bool:
        return self._valid and bool(self._run)


class _Replace(_Stateless):
    __slots__ = ("_content", "_pattern")

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def feed(self, pieces: list[str]) -> list[str]:
        return [piece.replace(self._pattern, self._content) for piece in pieces]


class _StripPieces(_Stateless):
    """Up to ``start`` and ``stop`` characters ``content`` off both ends of every piece."""

    __slots__ = ("_content", "_start", "_stop")

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop

    def feed(self, pieces: list[str]) -> list[str]:
        return [self._strip(piece) for piece in pieces]

    def _strip(self, piece: str) -> str:
        begin = 0
        while begin < min(self._start, len(piece)) and piece[begin] == self._content:
            begin += 1
        end = len(piece)
        while end > max(begin, len(piece) - self._stop) and piece[end - 1] == self._content:
            end -= 1
        return piece[begin:end]


class _StripStart(_Stateless):
    """Up to ``count`` characters ``content`` off the beginning of the whole text."""

    __slots__ = ("_content", "_left")

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def feed(self, pieces: list[str]) -> list[str]:
        if not self._left:
            return pieces
        text = "".join(pieces)
        begin = 0
        while self._left and begin < len(text):
            if text[begin] != self._content:
                self._left = 0
                break
            begin += 1
            self._left -= 1
        return [text[begin:]]


class _Metaspace(_Stateless):
    """The replacement character is a space, except in the first piece, where it is nothing."""

    __slots__ = ("_first", "_fused", "_replacement")

    def __init__(self, replacement: str, drop_in_first: bool, fused: bool) -> None:
        self._replacement = replacement
        self._first = drop_in_first
        self._fused = fused

    def feed(self, pieces: list[str]) -> list[str]:
        out = []
        for piece in pieces:
            out.append(piece.replace(self._replacement, "" if self._first else " "))
            if not self._fused:
                self._first = False
        return out


_StepFactory = Callable[[], _Step]


def _plan_chain(steps: list[dict[str, Any]]) -> list[_StepFactory] | None:
    """Factories of the streaming twins of a decoder's steps; None if there is one without a twin."""
    if not steps:
        return None  # without a decoder the library joins tokens with spaces
    factories: list[_StepFactory] = []
    fused = False  # the text is a single piece from here on
    for step in steps:
        factory = _plan_step(step, fused)
        if factory is None and step["type"] != "Fuse":
            return None
        if factory is not None:
            factories.append(factory)
        fused = fused or step["type"] in ("Fuse", "ByteLevel")
    return factories


def _plan_step(step: dict[str, Any], fused: bool) -> _StepFactory | None:
    match step["type"]:
        case "ByteLevel" if not fused:
            alphabet = byte_level_alphabet()
            return lambda: _ByteLevel(alphabet)
        case "ByteFallback" if not fused:
            return _ByteFallback
        case "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            # In fused text a longer pattern could lie across two pieces.
            if not pattern or (fused and len(pattern) > 1):
                return None
            return lambda: _Replace(pattern, content)
        case "Strip":
            content, start, stop = step["content"], step["start"], step["stop"]
            if not fused:
                return lambda: _StripPieces(content, start, stop)
            return None if stop else lambda: _StripStart(content, start)
        case "Metaspace":
            replacement, drop = step["replacement"], step.get("prepend_scheme", "always") != "never"
            return lambda: _Metaspace(replacement, drop, fused)
    return None


class Detokenizer(Protocol):
    """The text of one choice."""

    def feed(self, token_id: int) -> str:
        """Text completed by this token."""

    def flush(self) -> str:
        """The rest: the ids are over. The object must not be fed again."""

    @property
    def pending(self) -> bool:
        """Whether tokens were fed whose text is not out yet."""


class _ChainDetokenizer:
    __slots__ = ("_skipped", "_steps", "_tokens")

    def __init__(self, tokens: TokenText, steps: list[_Step], skipped: frozenset[int]) -> None:
        self._tokens = tokens
        self._steps = steps
        self._skipped = skipped

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        token = self._tokens.vocabulary_string(token_id)
        if token is None:
            return ""
        pieces = [token]
        for step in self._steps:
            pieces = step.feed(pieces)
        return "".join(pieces)

    def flush(self) -> str:
        pieces: list[str] = []
        for step in self._steps:
            pieces = [*step.feed(pieces), *step.flush()] if pieces else step.flush()
        return "".join(pieces)

    @property
    def pending(self) -> bool:
        return any(step.pending for step in self._steps)


class _WindowDetokenizer:
    """Decodes the last tokens with and without the new ones; the difference is the new text."""

    __slots__ = ("_backend", "_context", "_new", "_skipped", "_tokens")

    def __init__(self, tokens: TokenText, skipped: frozenset[int]) -> None:
        self._tokens = tokens
        self._backend = tokens.backend
        self._skipped = skipped
        self._context: list[int] = []
        self._new: list[int] = []

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokens.vocabulary_string(token_id) is None:
            return ""
        self._new.append(token_id)
        return self._take(final=len(self._new) >= _MAX_WINDOW)

    def flush(self) -> str:
        return self._take(final=True) if self._new else ""

    @property
    def pending(self) -> bool:
        return bool(self._new)

    def _take(self, final: bool) -> str:
        text = self._backend.decode(self._context + self._new, skip_special_tokens=False)
        if text.endswith(REPLACEMENT) and not final:
            return ""
        before = self._backend.decode(self._context, skip_special_tokens=False) if self._context else ""
        self._context, self._new = self._new, []
        return text[len(before) :]


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer."""

    def __init__(self, tokens: TokenText) -> None:
        self._tokens = tokens
        self._plan = _plan_chain(tokens.steps)

    def create(self, skip_special_tokens: bool = True) -> Detokenizer:
        skipped = self._tokens.special_ids if skip_special_tokens else frozenset[int]()
        if self._plan is None:
            return _WindowDetokenizer(self._tokens, skipped)
        return _ChainDetokenizer(self._tokens, [make() for make in self._plan], skipped)
