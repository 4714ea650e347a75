"""Stop strings: nothing of one is ever shown, whatever the split."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftruntime.tokenizer.stop import StopMatcher

ALPHABET = string.ascii_uppercase


def _run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    shown: list[str] = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return [*shown, matcher.flush()], stop
    return [*shown, matcher.flush()], None


def test_h04_no_part_of_a_stop_string_is_shown() -> None:
    shown, stop = _run(["DEFGHIJ"], list(ALPHABET))
    assert ("".join(shown), stop) == ("ABC", "DEFGHIJ")
    assert shown[:3] == ["A", "B", "C"]
    assert not any(shown[3:])


def test_h04_a_stop_string_cut_short_is_flushed() -> None:
    shown, stop = _run(["DEFGHIJ"], list(ALPHABET[:8]))
    assert stop is None
    assert shown[-1] == "DEFGH"
    assert "".join(shown[:-1]) == "ABC"


def test_h04_text_is_released_once_it_cannot_match() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("a") == ("", None)
    assert matcher.push("a") == ("", None)
    assert matcher.push("a") == ("a", None)  # "aa" may still go on
    assert matcher.push("b") == ("", "aab")


def test_the_earliest_match_wins() -> None:
    assert _run(["world", "hello"], ["hello world"]) == (["", ""], "hello")
    # "bc" is complete before the longer stop that starts earlier
    assert _run(["abcd", "bc"], ["xabcd"]) == (["xa", ""], "bc")
    # of two that end together the longer hides all of both
    assert _run(["c", "abc"], ["xabc"]) == (["x", ""], "abc")


def test_after_a_match_everything_is_swallowed() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("one. two.") == ("one", ".")
    assert matcher.push("three") == ("", ".")
    assert matcher.flush() == ""


def test_without_stops_nothing_is_held() -> None:
    assert _run([], ["ab", "c"]) == (["ab", "c", ""], None)


@pytest.mark.parametrize("stops", [[""], ["a", 3]])
def test_bad_stops_are_named(stops: list[str]) -> None:
    with pytest.raises(ValueError, match=r"stop\[\d\] is .*, expected a non-empty string"):
        StopMatcher(stops)


def _by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """Cut before the longest stop that ends at the first place where one ends."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_h04_matches_the_definition_for_every_split(stops: list[str], pieces: list[str]) -> None:
    expected, stop = _by_definition(stops, "".join(pieces))
    shown, found = _run(stops, pieces)
    assert ("".join(shown), found) == (expected, stop)
