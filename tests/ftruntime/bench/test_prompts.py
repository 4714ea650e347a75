"""Prompt lengths against a tokenizer written here: bytes, a fixed count a word, and odd counts.

Mutants tried and seen red: a shuffle that repeats words, the head's tokens left out, the two probes
mixed up, one seed for all prompts, probes that grow by one token.
"""

from __future__ import annotations

import pytest

from ftruntime.bench.prompts import HEAD, WORDS, Calibration, probe, prompt


def by_word(text: str) -> int:
    """A word costs one token for each three letters begun; five more for the server's frame."""
    return 5 + sum(-(-len(word) // 3) for word in text.split())


def by_byte(text: str) -> int:
    return 11 + len(text.encode())


@pytest.mark.parametrize("count", [by_word, by_byte])
@pytest.mark.parametrize("wanted", [300, 1001, 4099, 200_019])
def test_a_prompt_has_the_wanted_tokens(count, wanted):
    calibration = Calibration.from_probes(count(probe(0)), count(probe(1)))
    found = count(prompt(calibration.num_words(wanted), seed=77))
    longest = max(count(f"{HEAD} {word}") for word in WORDS) - count(HEAD)
    # only the last, partial shuffle is a guess
    assert abs(found - wanted) <= longest * len(WORDS) / 4


@pytest.mark.parametrize("count", [by_word, by_byte])
def test_whole_shuffles_are_exact(count):
    calibration = Calibration.from_probes(count(probe(0)), count(probe(1)))
    for shuffles in (1, 2, 9):
        exact = count(prompt(shuffles * len(WORDS), seed=shuffles))
        assert calibration.head_tokens + shuffles * calibration.shuffle_tokens == exact
        assert calibration.num_words(exact) == shuffles * len(WORDS)


def test_a_prompt_shorter_than_its_head_has_one_word():
    assert Calibration(22, 100).num_words(3) == 1


def test_every_shuffle_has_every_word_once():
    words = prompt(3 * len(WORDS), seed=4).removeprefix(HEAD).split()
    for start in range(0, len(words), len(WORDS)):
        assert sorted(words[start : start + len(WORDS)]) == sorted(WORDS)


def test_prompts_of_two_seeds_differ_from_the_start_and_one_seed_repeats():
    first = {prompt(3, seed) for seed in range(40)}
    assert len(first) >= 39
    assert prompt(500, 7) == prompt(500, 7)


def test_probes_that_grow_by_a_token_for_every_four_words_are_taken():
    assert Calibration.from_probes(10, 28) == Calibration(1, 9)


@pytest.mark.parametrize("counts", [(10, 10), (10, 9), (0, 30), (10, 27)])
def test_probes_that_do_not_grow_are_refused(counts):
    with pytest.raises(ValueError, match=rf"usage.prompt_tokens is {counts[0]} .* expected to gr"):
        Calibration.from_probes(*counts)
