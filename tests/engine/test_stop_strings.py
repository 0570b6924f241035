"""Stop strings against a brute-force model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.engine.stop_strings import StopStrings


def run(stops: list[str], chunks: list[str], include: bool = False, unarmed: int = 0) -> tuple[str, str | None]:
    """Feed chunks, the first ``unarmed`` of them unarmed; the whole output and the stop string."""
    filter_ = StopStrings(stops, include)
    out = ""
    for index, chunk in enumerate(chunks):
        text, match = filter_.feed(chunk, armed=index >= unarmed)
        out += text
        if match is not None:
            return out, match.stop
    return out + filter_.flush(), None


def expected(stops: list[str], chunks: list[str], include: bool, unarmed: int) -> tuple[str, str | None]:
    text = "".join(chunks)
    for end in range(len("".join(chunks[:unarmed])) + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


WORDS = st.text(alphabet="ab€", min_size=1, max_size=5)
CHUNKS = st.lists(st.text(alphabet="ab€", max_size=4), max_size=12)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.lists(WORDS, min_size=1, max_size=4, unique=True), CHUNKS, st.booleans(), st.integers(0, 4))
def test_equals_the_model(stops: list[str], chunks: list[str], include: bool, unarmed: int) -> None:
    assert run(stops, chunks, include, unarmed) == expected(stops, chunks, include, unarmed)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(WORDS, min_size=1, max_size=4, unique=True), CHUNKS, st.booleans())
def test_holds_back_exactly_what_may_become_a_stop(stops: list[str], chunks: list[str], armed: bool) -> None:
    filter_ = StopStrings(stops)
    text = ""
    for chunk in chunks:
        _, match = filter_.feed(chunk, armed)
        if match is not None:
            return
        text += chunk
        longest = max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)
        assert filter_.num_held == longest


@pytest.mark.parametrize("cut", range(1, 9))
def test_cut_anywhere(cut: int) -> None:
    text = "abc STOP def"
    assert run([" STOP"], [text[:cut], text[cut:]]) == ("abc", " STOP")
    assert run([" STOP"], [text[:cut], text[cut:]], include=True) == ("abc STOP", " STOP")


def test_a_prefix_that_comes_to_nothing_is_let_out() -> None:
    assert run(["aab"], ["a", "a", "a", "c"]) == ("aaac", None)
    assert run(["\n\n"], ["x\n"]) == ("x\n", None)


def test_completed_first_wins_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["c", "abc"], ["xabc"]) == ("x", "abc")


def test_begun_before_min_tokens_and_completed_after_counts() -> None:
    assert run(["ab"], ["a", "b"], unarmed=1) == ("", "ab")
    assert run(["ab"], ["ab", "ab"], unarmed=1) == ("ab", "ab")
    assert run(["aa"], ["aa", "a"], unarmed=1) == ("a", "aa")


def test_without_stop_strings_everything_passes() -> None:
    assert run([], ["a", "", "b"]) == ("ab", None)
    assert run([""], ["a"]) == ("a", None)
