"""Batches: a function of seed and step, with answers that stand where they are weighted.

Mutants run, each noticed: the step left out of the seed, weights one token late, questions before
their statement, held names told twice, repeats said once or all of them text, as many answers of
one verse as of three.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from demo.data import ANSWER_WEIGHT, Data
from demo.text import Chapter
from ftruntime.demo.vocabulary import ADDED_TOKENS, SPECIAL_TOKENS, build_tokenizer
from ftruntime.tokenizer.special import ASSISTANT, BOS, EOS, THINK_CLOSE, USER

VERSES = tuple(
    f"And the king of number {n} said unto Abner, I will not go up with the men of Judah."
    for n in range(40)
)
CHAPTERS = [Chapter(f"Kings {i}", VERSES[i : i + 8]) for i in range(12)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(300, [chapter.text for chapter in CHAPTERS])


@pytest.fixture(scope="module")
def data(tokenizer):
    return Data(CHAPTERS, tokenizer)


def shown(tokenizer, ids):
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def test_the_stream_is_the_text(data, tokenizer):
    expected = "".join(chapter.text + "\n\n" for chapter in CHAPTERS)
    assert shown(tokenizer, data.stream) == expected
    assert int(data.counts(300).sum()) == len(data.stream)


def test_a_batch_follows_from_seed_and_step(data):
    first, again = data.batch(1, 7, 4, 256), data.batch(1, 7, 4, 256)
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.weights, again.weights)
    for other in (data.batch(1, 8, 4, 256), data.batch(2, 7, 4, 256)):
        assert not torch.equal(first.ids, other.ids)
    assert first.ids.shape == first.weights.shape == (4, 256)
    bos = SPECIAL_TOKENS.index(BOS)
    assert (first.ids[:, 0] == bos).all()
    assert (first.weights[:, 0] == 0).all()


def test_answers_stand_behind_their_statements(data, tokenizer):
    heavy = 0
    for step in range(30):
        batch = data.batch(3, step, 2, 640)
        for ids, weights in zip(batch.ids, batch.weights, strict=True):
            at = np.flatnonzero(weights.numpy() == ANSWER_WEIGHT)
            if not len(at):
                continue
            runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
            for run in runs:
                answer = shown(tokenizer, ids[run])
                before = shown(tokenizer, ids[: run[0]])
                name = re.search(r"The number of (\w+) is$", before)
                assert name, before[-60:]
                told = re.findall(rf"The number of {name[1]} is (\d+)\.\n", before)
                assert told, before
                assert f" {told[0]}".startswith(answer)
                assert set(told) == {told[0]}
                heavy += 1
    assert heavy > 30


def test_repeats_are_said_twice(data, tokenizer):
    """A passage begins again where it ended; half of them are no text."""
    sizes, in_order, text = [], 0, shown(tokenizer, data.stream)
    for step in range(60):
        (ids,) = data.batch(5, step, 1, 512, repeats=1.0).ids.numpy()
        words = shown(tokenizer, ids)
        if USER in words or "What is the number" in words:
            continue
        at = 1
        # up to one that the sequence may cut
        while at + 2 * 256 <= len(ids) or at == 1:
            size = next(n for n in range(16, 257) if twice(ids[at : at + 2 * n], n))
            sizes.append(size)
            in_order += shown(tokenizer, ids[at : at + size]) in text
            at += 2 * size
    assert len(sizes) > 30
    assert min(sizes) < 32
    assert max(sizes) > 100
    assert 0.3 < in_order / len(sizes) < 0.7


def twice(ids, size):
    """Whether the second half is the first, as far as it goes."""
    rest = ids[size:]
    return (ids[: len(rest)] == rest).all()


def test_an_exchange(data, tokenizer):
    special = set(SPECIAL_TOKENS) | set(ADDED_TOKENS)
    pattern = "(.+)".join(map(re.escape, (BOS + USER, ASSISTANT + THINK_CLOSE, EOS)))
    rng = np.random.default_rng(0)
    counts = [0, 0, 0]
    for _ in range(200):
        text = shown(tokenizer, data.chat(rng))
        form = re.fullmatch(pattern, text, re.DOTALL)
        assert form, text
        assert not any(token in part for part in form.groups() for token in special)
        lines = form[2].split("\n")
        assert 1 <= len(lines) <= 3
        first = VERSES.index(lines[0])
        assert lines == list(VERSES[first : first + len(lines)])
        counts[len(lines) - 1] += 1
    # behind each verse the end is the likelier
    assert counts[0] > 1.5 * (counts[1] + counts[2])
    assert counts[1] > counts[2] > 0
