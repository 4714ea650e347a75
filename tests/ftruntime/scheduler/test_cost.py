"""The prediction of step times: exact where the formula is, careful where nothing was seen.

Mutants run, each noticed: coefficients of any sign; no weighting by the measured time; slices kept
apart; no margin; a margin that never shrinks; fewer tokens trusted; more tokens trusted.
"""

from __future__ import annotations

import itertools
import random

import pytest

from ftruntime.scheduler.cost import LayerShares, StepCost, Work

A, B, D = 0.262, 0.200e-3, 1.08e-9


def seconds(work: Work) -> float:
    return work.share * (A + work.tokens * (B + D * work.context))


def learned(works: list[Work], times: int = 1) -> StepCost:
    cost = StepCost()
    for work in works * times:
        cost.observe(work, seconds(work))
    return cost


def test_nothing_is_known_at_first() -> None:
    cost = StepCost()
    assert not cost.known
    assert cost.predict(Work(1.0, 128)) == cost.least(Work(1.0, 128)) == 0
    assert not cost.covers(Work(1.0, 128))


def test_the_formula_is_found() -> None:
    works = [Work(1.0, tokens, 1000.0 * n) for n, tokens in enumerate((128, 500, 3456, 1024) * 4)]
    cost = learned(works)
    for share, tokens, context in ((1.0, 128, 0), (0.25, 2000, 3000), (1 / 43, 3456, 15_000)):
        work = Work(share, tokens, context)
        assert cost.covers(work)
        assert cost.least(work) == pytest.approx(seconds(work), rel=1e-3)
        assert cost.predict(work) == pytest.approx(1.05 * seconds(work), rel=1e-3)


def test_a_prediction_grows_in_everything() -> None:
    rng = random.Random(1)
    cost = StepCost()
    for _ in range(64):
        work = Work(rng.random(), rng.randint(1, 4096), rng.uniform(0, 1e5))
        # as if a longer context made a step shorter
        cost.observe(work, seconds(work) * rng.uniform(0.5, 1.5) * (1.2 - work.context / 1e5))
    sizes = [0.1, 0.5, 1.0]
    for low, high in itertools.pairwise(sizes):
        for grown in (
            (Work(low, 2000, 5e4), Work(high, 2000, 5e4)),
            (Work(1.0, int(4096 * low), 5e4), Work(1.0, int(4096 * high), 5e4)),
            (Work(1.0, 2000, 1e5 * low), Work(1.0, 2000, 1e5 * high)),
        ):
            assert cost.predict(grown[0]) <= cost.predict(grown[1])


def test_beyond_what_was_seen_the_prediction_is_an_upper_bound() -> None:
    cost = learned([Work(1.0, 1024)], 12)
    for tokens in (1, 128, 512, 1024, 1025, 4096, 100_000):
        work = Work(1.0, tokens)
        assert cost.least(work) <= seconds(work) <= cost.predict(work)
    assert cost.predict(Work(1.0, 128)) == cost.predict(Work(1.0, 1024))
    assert cost.predict(Work(1.0, 4096)) == pytest.approx(4 * cost.predict(Work(1.0, 1024)))


def test_contexts_far_beyond_are_not_covered() -> None:
    cost = learned([Work(1.0, 1024, 10_000.0)])
    assert cost.covers(Work(1.0, 1024, 20_000.0 + 2 * 1024))
    assert not cost.covers(Work(1.0, 1024, 20_000.0 + 2 * 1024 + 1))


def test_slices_of_a_chunk_are_one_observation() -> None:
    cost = StepCost()
    small = Work(1.0, 128)
    cost.observe(small, seconds(small))
    for chunk in range(40):
        for _ in range(43):
            work = Work(1 / 43, 3456, 3456.0 * chunk)
            cost.observe(work, seconds(work))
    assert cost.predict(small) == pytest.approx(1.05 * seconds(small), rel=1e-3), "still in view"


def test_the_margin_follows_the_error_and_forgets_it() -> None:
    work, cost = Work(1.0, 1024), StepCost()
    assert cost.margin == 0.25
    for _ in range(20):
        cost.observe(work, 1.0)
    assert cost.margin == pytest.approx(0.05)
    cost.observe(work, 1.3)
    assert cost.margin == pytest.approx(0.3)
    cost.observe(work, 100.0)
    assert cost.margin == 1.0, "one stray step does not stop everything"
    for _ in range(32):
        cost.observe(work, 1.0)
    assert cost.margin == pytest.approx(0.05)


def test_a_machine_that_slows_down_is_believed_after_one_step() -> None:
    work, cost = Work(1.0, 1024), StepCost()
    for _ in range(64):
        cost.observe(work, 1.0)
    cost.observe(work, 1.5)
    assert cost.predict(work) >= 1.49


def test_steps_that_take_no_time_are_harmless() -> None:
    cost = StepCost()
    for _ in range(10):
        cost.observe(Work(1.0, 128), 0.0)
    assert 0 < cost.predict(Work(1.0, 128)) < 1e-5


def test_noise_of_a_tenth_is_covered_by_the_margin() -> None:
    """Of 1000 steps of random size, the share whose time is above its prediction."""
    rng, cost, over = random.Random(4), StepCost(), 0
    for step in range(1100):
        work = Work(rng.choice((0.1, 0.5, 1.0)), 128 * rng.randint(1, 27), rng.uniform(0, 2e5))
        actual = seconds(work) * rng.uniform(0.9, 1.1)
        if step >= 100:
            over += actual > cost.predict(work)
            assert actual <= 1.1 * cost.predict(work)
        cost.observe(work, actual)
    assert over <= 30


def test_shares_of_layers_are_even_at_first_and_follow_what_slices_take() -> None:
    shares, true = LayerShares(4), (1.0, 3.0, 2.0, 2.0)
    assert [shares.of(n, n + 1) for n in range(4)] == [0.25] * 4
    shares.observe(0, 4, 9.0)
    assert shares.of(0, 1) == 0.25, "a whole chunk tells nothing"
    for _ in range(10):
        for layer, weight in enumerate(true):
            shares.observe(layer, layer + 1, 5.0 * weight)
    for first, end in ((0, 1), (1, 2), (1, 3), (0, 4)):
        assert shares.of(first, end) == pytest.approx(sum(true[first:end]) / 8, rel=1e-3)


def test_slices_of_a_chunk_that_was_given_up_tell_nothing() -> None:
    shares = LayerShares(4)
    shares.observe(2, 4, 9.0)
    shares.observe(0, 1, 9.0)
    shares.observe(0, 2, 1.0)
    shares.observe(2, 4, 1.0)
    assert shares.of(0, 1) == 0.25
