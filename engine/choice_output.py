"""The output of one choice: tokens in, text and log probabilities out.

Joins the detokenizer, the stop strings and what a resumed client already has. Knows no messages and no other choice.
"""

from __future__ import annotations

from collections import deque

from ringserve.engine.detokenizer import Detokenizer
from ringserve.engine.stop_strings import StopStrings
from ringserve.messages.logprobs import TokenLogprob


class ChoiceOutput:
    """What has become of one choice's tokens so far.

    Args:
        detokenizer: fresh.
        stops: fresh.
        min_tokens: a stop string counts only if its last character comes from a later token than this many.
        characters_sent: characters at the beginning that are not given out: the client has them.
    """

    __slots__ = (
        "_characters_decoded",
        "_characters_out",
        "_detokenizer",
        "_logprobs",
        "_min_tokens",
        "_stops",
        "_text",
        "_to_skip",
        "num_tokens",
        "started",
        "stop",
    )

    def __init__(
        self, detokenizer: Detokenizer, stops: StopStrings, min_tokens: int = 0, characters_sent: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._to_skip = characters_sent
        self._text: list[str] = []
        self._characters_decoded = 0
        self._characters_out = 0
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()
        self.num_tokens = 0
        """Tokens fed, the resumed ones among them."""
        self.stop: str | None = None
        """The stop string that ended the choice; nothing may be fed after that."""
        self.started = False
        """Whether its first output was announced (kept here for the caller)."""

    def feed(self, token_id: int, logprob: TokenLogprob | None = None, visible: bool = True) -> None:
        """Take in a token. Not ``visible``: it counts, but its text is not part of the output (stop tokens)."""
        self.num_tokens += 1
        if visible:
            self._decoded(self._detokenizer.feed(token_id))
        if logprob is not None:
            # Released when the token's text is out; an unfinished character will be at least one more.
            end = self._characters_decoded + (1 if self._detokenizer.pending else 0)
            self._logprobs.append((end, logprob))

    def finish(self) -> None:
        """No more tokens: let out what was held back. May find a stop string in it."""
        if self.stop is None:
            self._decoded(self._detokenizer.flush())
        if self.stop is None:
            self._emit(self._stops.flush())

    def take_text(self) -> str:
        """The text since the last call."""
        text = "".join(self._text)
        self._text.clear()
        return text

    def take_logprobs(self, final: bool) -> tuple[TokenLogprob, ...]:
        """Log probabilities of tokens whose text is out; ``final``: of all that are left."""
        ready = []
        while self._logprobs and (final or self._logprobs[0][0] <= self._characters_out):
            ready.append(self._logprobs.popleft()[1])
        return tuple(ready)

    def _decoded(self, text: str) -> None:
        if not text:
            return
        self._characters_decoded += len(text)
        out, match = self._stops.feed(text, armed=self.num_tokens > self._min_tokens)
        self._emit(out)
        if match is not None:
            self.stop = match.stop

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._characters_out += len(text)
        if self._to_skip:
            skipped = min(self._to_skip, len(text))
            self._to_skip -= skipped
            text = text[skipped:]
        if text:
            self._text.append(text)
