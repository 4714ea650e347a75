"""The text in chapters, its split, and the baselines by hand.

Mutants run, each noticed: a verse without its last character, a split that follows the order, an
added count left out of the unigram, kinds and total swapped in the 5-gram.
"""

from __future__ import annotations

import itertools
import math
import string

import pytest

from demo import baselines, text

RAW = """

Genesis 1

  1 In the beginning.
  2 And the earth:

1 Samuel 31

 10 And they put his armour.
"""


def test_parse():
    chapters = text.parse(RAW)
    assert [c.heading for c in chapters] == ["Genesis 1", "1 Samuel 31"]
    assert [c.verses for c in chapters] == [
        ("In the beginning.", "And the earth:"), ("And they put his armour.",),
    ]  # fmt: skip
    assert text.join(chapters) == (
        "Genesis 1\nIn the beginning.\nAnd the earth:\n\n1 Samuel 31\nAnd they put his armour.\n"
    )


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("", "text is empty, expected chapters"),
        ("  1 A verse.", "line 1 is '  1 A verse.', expected a heading or a verse"),
        (RAW + "and so on", "line 11 is 'and so on', expected a heading or a verse"),
    ],
)
def test_what_is_no_text(raw, sentence):
    with pytest.raises(ValueError, match=sentence):
        text.parse(raw)


@pytest.mark.parametrize("share", [0.05, 0.3, 1e-9])
def test_split(share):
    chapters = [text.Chapter(f"Book {i}", ("x",)) for i in range(100)]
    train, held_out = text.split(chapters, seed=1, held_out=share)
    assert len(held_out) == max(1, round(100 * share))
    assert sorted(train + held_out, key=chapters.index) == chapters
    assert held_out == sorted(held_out, key=chapters.index)
    assert text.split(chapters, seed=1, held_out=share) == (train, held_out)
    assert text.split(chapters, seed=2, held_out=share) != (train, held_out)
    if share == 0.3:
        assert held_out != chapters[:30]


def test_unigram_by_hand():
    # four letters and the unseen c: (2+1)/7, (2+1)/7, (0+1)/7
    assert baselines.unigram("abab", "abc") == pytest.approx(
        -(2 * math.log2(3 / 7) + math.log2(1 / 7)) / 3
    )


def test_bigram_by_hand():
    # train "aab": a twice, b once, two kinds; behind a: a once, b once
    empty = 1 / 2
    a, b = (2 + 2 * empty) / (3 + 2), (1 + 2 * empty) / (3 + 2)
    behind_a = (1 + 2 * b) / (2 + 2)
    assert baselines.ngram("aab", "ab", order=2) == pytest.approx(
        -(math.log2(a) + math.log2(behind_a)) / 2
    )


def test_chances_sum_to_one():
    """The last character of every continuation, by the difference of two texts' bits."""
    train, before = "abracadabra" * 3 + "xyz", "abrac"
    letters = sorted(set(train))
    known = baselines.ngram(train, before) * len(before)
    chances = [
        2 ** (known - baselines.ngram(train, before + c) * (len(before) + 1)) for c in letters
    ]
    assert sum(chances) == pytest.approx(1)


def test_more_context_tells_more():
    pattern = "".join(itertools.islice(itertools.cycle(string.ascii_lowercase), 600))
    assert baselines.ngram(pattern, pattern) < 0.2 < baselines.unigram(pattern, pattern)
