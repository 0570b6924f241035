"""Token counts of an answer."""

from __future__ import annotations

from typing import Any

from ringserve.messages.text_outputs import TextFinish, TextStart


class Usage:
    """Counts over all choices of an HTTP answer; each prompt counts once, whatever its ``n``."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompts: dict[int, tuple[int, int]] = {}
        self._generated: dict[int, int] = {}

    def start(self, choice: int, start: TextStart) -> None:
        self._prompts.setdefault(choice // self._n, (start.num_prompt_tokens, start.num_cached_tokens))

    def tokens(self, choice: int, count: int) -> None:
        self._generated[choice] = self._generated.get(choice, 0) + count

    def finish(self, choice: int, finish: TextFinish) -> None:
        self._generated[choice] = finish.num_output_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(total for total, _ in self._prompts.values())

    @property
    def completion_tokens(self) -> int:
        return sum(self._generated.values())

    def body(self) -> dict[str, Any]:
        """OpenAI's CompletionUsage."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        cached = sum(cached for _, cached in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
