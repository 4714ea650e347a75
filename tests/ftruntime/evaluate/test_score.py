"""Scores of a text and recall of needles, with engines that answer by formula.

Mutants run, each noticed: natural logarithms reported as bits, BOS counted as a token, windows
that share a token, the last window dropped, the distance counted from the front of the statement,
a needle found inside a longer number, the other names' numbers allowed to be equal, room for less
than the longest name, room of a text and of a prompt confused, a share of no trials.
"""

from __future__ import annotations

import math
import random

import pytest

from ftruntime.completion import CompletionOutput, RequestOutput
from ftruntime.evaluate import needles, score

BOS = 256


class Bytes:
    """One token a byte."""

    bos_token_id = BOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Formula:
    """Every token of a prompt has the log-probability `-1 / (1 + id)` times its position."""

    def __init__(self, reply=lambda prompt: ""):
        self.reply = reply
        self.calls = []

    def generate(self, prompts, sampling_params):
        self.calls.append((prompts, sampling_params))
        return [self._output(prompt) for prompt in prompts]

    def _output(self, prompt):
        entries = [{t: -i / (1 + t), 999: -9.0} for i, t in enumerate(prompt)]
        entries[0] = None
        completion = CompletionOutput(0, [], self.reply(prompt), "length", None)
        return RequestOutput(None, prompt, entries, 0, [completion])


def nats_by_hand(text, context):
    """Position within its window, BOS being 0, over 1 + the byte; windows are filled in turn."""
    place, total = 0, 0.0
    for byte in text.encode():
        place = place % (context - 1) + 1
        total += place / (1 + byte)
    return total


@pytest.mark.parametrize("context", [2, 3, 8, 11, 500])
@pytest.mark.parametrize("together", [1, 3])
def test_bits(context, together):
    text = "In the beginning w\u00e9 \u4e2d!"
    shares = []
    engine = Formula()
    result = score.score_text(
        engine, Bytes(), text, context=context, together=together,
        progress=lambda part, share: shares.append(share),
    )  # fmt: skip
    size = len(text.encode())
    assert (result.characters, result.tokens) == (len(text), size)
    assert result.windows == math.ceil(size / (context - 1))
    bits = nats_by_hand(text, context) / math.log(2)
    assert result.bits == pytest.approx(bits, rel=1e-12)
    assert result.bits_per_character == pytest.approx(bits / len(text))
    assert result.to_dict()["bits_per_token"] == pytest.approx(bits / size)
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert all(len(prompts) <= together for prompts, _ in engine.calls)


def test_windows_hold_every_token_once():
    ids = list(range(23))
    parts = score.windows(ids, BOS, 6)
    assert [part[0] for part in parts] == [BOS] * 5
    assert [i for part in parts for i in part[1:]] == ids
    assert max(map(len, parts)) == 6
    assert score.windows([], BOS, 6) == []


@pytest.mark.parametrize("distance", [300, 601, 3000])
def test_a_needle_lies_at_its_distance(distance):
    filler = list(b"x" * 4000)
    prompt, answer = score.needle_prompt(Bytes(), filler, distance, random.Random(distance))
    text = bytes(prompt[1:]).decode()
    number = int(answer)
    asked = text.rsplit("\n", 1)[1]
    name = next(name for name in needles.NAMES if asked == needles.question(name))
    told = needles.statement(name, number)
    assert prompt[0] == BOS
    assert text.count(told) == 1
    assert len(text) - text.index(told) - len(told) - len("\n" + asked) == distance
    others = [n for n in needles.NAMES if n != name and f"The number of {n} is " in text]
    assert len(others) == 3
    assert text.count(f" {number}.") == 1


def oracle(prompt):
    """Reads the number where it was told."""
    text = bytes(prompt[1:]).decode()
    name = text.rsplit(" is", 1)[0].rsplit(" ", 1)[1]
    return " " + text.split(f"The number of {name} is ")[1][:2] + ".\n"


def run_needles(reply, longest=4096, filler=b"y" * 5000, trials=7):
    return score.score_needles(
        Formula(reply), Bytes(), filler.decode(), trials=trials, seed=3, longest=longest, together=4
    )


def test_recall_of_one_who_reads_and_one_who_guesses():
    read = run_needles(oracle)
    assert [r.distance for r in read] == list(score.DISTANCES)
    assert [(r.trials, r.found) for r in read] == [(7, 7)] * len(read)
    assert read[0].to_dict() == {"distance": 300, "trials": 7, "found": 7, "recall": 1.0}
    assert all(r.found <= 1 for r in run_needles(lambda prompt: " 47."))


def test_the_same_seed_gives_the_same_prompts():
    first, second = Formula(), Formula()
    for engine in (first, second):
        score.score_needles(
            engine, Bytes(), "z" * 4000, trials=2, seed=5, longest=900, together=8
        )
    assert first.calls == second.calls
    assert all(params.temperature == 0 for _, params in first.calls)


def test_distances_that_do_not_fit_are_left_out():
    assert [r.distance for r in run_needles(oracle, longest=750)] == [300, 600]
    assert [r.distance for r in run_needles(oracle, longest=749)] == [300]
    with pytest.raises(ValueError, match="and 449 of a prompt, expected more than 340 and at"):
        run_needles(oracle, longest=449)
    assert [r.distance for r in run_needles(oracle, filler=b"y" * 641)] == [300, 600]
    assert [r.distance for r in run_needles(oracle, filler=b"y" * 640)] == [300]
    with pytest.raises(ValueError, match="there are 340 tokens of text and 4096 of a prompt"):
        run_needles(oracle, filler=b"y" * 340)


def test_what_is_short_of_a_distance():
    assert score.short_of(600, 641, 750) == (False, False)
    assert score.short_of(600, 640, 750) == (True, False)
    assert score.short_of(600, 641, 749) == (False, True)
    assert score.short_of(601, 641, 750) == (True, True)


def test_no_trials_have_no_share():
    left_out = {"distance": 600, "trials": 0, "found": 0, "recall": None}
    assert score.Recall(600, 0, 0).to_dict() == left_out


def test_prompts_keep_within_the_longest_sequence():
    """Of a token a byte, which takes the most room; the engine refuses what is longer."""
    engine = Formula(oracle)
    score.score_needles(
        engine, Bytes(), "y" * 341, trials=400, seed=1, longest=450, together=400
    )
    ((prompts, params),) = engine.calls
    assert 440 < max(map(len, prompts)) + params.max_tokens <= 450


@pytest.mark.parametrize(
    ("text", "right"),
    [(" 47.", True), ("47", True), ("\n 47 men", True), (" 478", False), (" 4", False),
     ("is 47", False), ("", False)],
)  # fmt: skip
def test_is_answer(text, right):
    assert score.is_answer(text, " 47") == right


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match="--text is empty, expected a text to score"):
        score.score_text(Formula(), Bytes(), "", context=8, together=1)
