"""The gap bound on a virtual clock, at the given (not timed) step costs of `timed`.

Mutants run, each noticed: the decode's own time left out; the gap counted from the start of the
decode; whole chunks while rows decode; no floor after a decode; no aging; chunks cut before slices;
the first chunk at full size; rows that join not counted, for the next slice or for its size.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from ftruntime.scheduler.cost import StepCost
from ftruntime.types import StepPlan
from tests.ftruntime.scheduler.timed import (
    DECODE_S,
    NUM_LAYERS,
    SEED_LIMITS,
    Timed,
    attack,
    noisy,
    step_seconds,
    wall,
)

WIDE_LIMITS = replace(SEED_LIMITS, chunk_tokens=6912, window_pages=408)


@pytest.fixture(scope="module")
def unset_s() -> float:
    timed = attack()
    assert max(timed.gaps) == pytest.approx(wall(timed), abs=0.1), "no decode cuts in"
    assert wall(timed) == pytest.approx(76.4, abs=0.2)
    return wall(timed)


@pytest.mark.parametrize(
    ("bound_s", "more"), [(1.5, 0.035), (0.9, 0.05), (0.3, 0.08), (0.1, 0.3)], ids=str
)
@pytest.mark.parametrize("every", [None, 8], ids=["alone", "N=8"])
def test_s01_s02_the_bound_holds_at_a_small_price(
    bound_s: float, more: float, every: int | None, unset_s: float
) -> None:
    timed = attack(max_decode_gap_s=bound_s, decode_interleave_every=every)
    assert max(timed.gaps) <= bound_s
    assert wall(timed) <= (1 + more) * unset_s


def test_the_fixed_cost_of_a_chunk_is_paid_once() -> None:
    """58 full chunks; a small one more at most, by which the server learns."""
    timed = attack(max_decode_gap_s=0.9)
    chunks = [p for p in timed.plans if p.kind == "prefill" and p.layers[0] == 0][1:]
    assert len(chunks) <= 59
    assert chunks[0].num_tokens < 3456, "the victim's 17 tokens say little"
    assert all(chunk.num_tokens == 3456 for chunk in chunks[1:-1])


@pytest.mark.parametrize(
    ("groups", "bound_s", "faster"), [(4, 0.8, 0.05), (8, 0.45, 0.0)], ids=["G=4", "G=8"]
)
def test_larger_chunks_in_slices_beat_the_historical_order(
    groups: int, bound_s: float, faster: float, unset_s: float
) -> None:
    timed = attack(WIDE_LIMITS, prefill_layer_groups=groups)
    assert max(timed.gaps) <= bound_s
    assert wall(timed) <= (1 - faster) * unset_s


@pytest.mark.parametrize(("groups", "bound_s"), [(1, 1.5), (2, 0.6), (4, 0.25), (8, 0.25)])
def test_with_slices_given_chunks_are_sized_to_fit(groups: int, bound_s: float) -> None:
    timed = attack(max_decode_gap_s=bound_s, prefill_layer_groups=groups)
    assert max(timed.gaps) <= bound_s
    slices = {p.layers for p in timed.plans if p.kind == "prefill"}
    assert len(slices) == groups
    sizes = [p.num_tokens for p in timed.plans if p.kind == "prefill" and p.layers[0] == 0]
    assert all(size % 128 == 0 for size in sizes[1:-1])
    # the work of a slice grows with the context: the last whole chunk nearly fills the bound
    largest = max(step_seconds(p) for p in timed.plans if p.kind == "prefill")
    assert largest >= 0.8 * bound_s


@pytest.mark.parametrize("bound_s", [1.5, 0.9, 0.3], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_noise_exceeds_the_bound_by_less_than_that_of_one_step(bound_s: float, seed: int) -> None:
    """Each step takes 90 to 110 %: few gaps exceed the bound, and by less than 10 % of it."""
    timed = attack(seconds=noisy(0.1, seed), max_decode_gap_s=bound_s)
    assert max(timed.gaps) <= 1.1 * bound_s
    assert sum(gap > bound_s for gap in timed.gaps) <= 3


def test_s02_a_prompt_shorter_than_n_chunks_is_protected() -> None:
    timed = Timed(replace(SEED_LIMITS, max_decode_gap_s=1.0, decode_interleave_every=8))
    timed.submit("victim", 17, 2000)
    timed.run(until=6.0)
    timed.submit("short", 5 * 3456, 3)
    timed.run(until=20.0)
    assert max(timed.gaps) <= 1.0


def test_alone_a_prompt_runs_in_full_chunks() -> None:
    timed = Timed(replace(SEED_LIMITS, max_decode_gap_s=0.3))
    timed.submit("alone", 200_019, 3)
    timed.run()
    prefills = [p for p in timed.plans if p.kind == "prefill"]
    assert [p.num_tokens for p in prefills] == [3456] * 57 + [200_019 - 57 * 3456]
    assert {p.layers for p in prefills} == {(0, NUM_LAYERS)}


def test_nothing_is_known_at_first() -> None:
    """Both in one step, as if the server had begun there: the next piece is a page in one layer."""
    timed = Timed(replace(SEED_LIMITS, max_decode_gap_s=0.3))
    timed.submit("victim", 17, 50)
    timed.step()
    timed.scheduler._pace._gap._prefill_cost = StepCost()  # type: ignore[union-attr]
    timed.submit("long", 50_000, 3)
    timed.step()
    assert (timed.plans[-1].num_tokens, timed.plans[-1].layers) == (128, (0, 1))


def test_what_is_left_of_a_chunk_runs_at_once_when_nobody_decodes_any_more() -> None:
    timed = Timed(replace(SEED_LIMITS, max_decode_gap_s=0.3))
    timed.submit("victim", 17, 2000)
    timed.run(until=6.0)
    timed.submit("long", 50_000, 3)
    while timed.plans[-1].layers[1] in (NUM_LAYERS, 0):
        timed.step()
    assert timed.scheduler.cancel("victim") is not None
    done = timed.plans[-1].layers[1]
    timed.step()
    assert timed.plans[-1].layers == (done, NUM_LAYERS)


def test_unset_the_cost_of_steps_does_not_matter() -> None:
    kinds = [[p.kind for p in attack(seconds=noisy(0.9, n)).plans[-70:]] for n in range(3)]
    assert kinds[0] == kinds[1] == kinds[2]


def test_s06_a_bound_that_cannot_hold_slows_prefill_and_does_not_stop_it(
    caplog: pytest.LogCaptureFixture, unset_s: float
) -> None:
    caplog.set_level(logging.WARNING)
    timed = attack(max_decode_gap_s=0.02)
    assert wall(timed) <= 1.2 * unset_s
    lines = [r.getMessage() for r in caplog.records if "gap bound cannot hold" in r.getMessage()]
    assert len(lines) == 1
    smallest_ms = float(lines[0].split("smallest_ms=")[1].split(":")[0])
    least_s = (0.262 + 128 * 0.2e-3) / NUM_LAYERS + DECODE_S
    assert smallest_ms == pytest.approx(1e3 * least_s, rel=0.1)
    # pieces grow with the wait: a gap is never longer than 1/64 of it, beside what cannot be cut
    ends, wait_s = [p for p in timed.plans if p.interleaved], wall(timed)
    assert len(ends) > 100
    assert max(timed.gaps) <= wait_s / 64 + 0.05 + DECODE_S


def test_s06_under_load_both_go_on() -> None:
    """Prompts arrive faster than they can be computed; decodes keep their bound, prompts go on."""
    limits = replace(SEED_LIMITS, max_running=4, max_decode_gap_s=0.5)
    timed = Timed(limits)
    submitted = 0
    while timed.now < 120.0:
        while submitted <= timed.now / 2.0:
            timed.submit(f"r{submitted}", 5000 + 997 * submitted % 9000, 40)
            submitted += 1
        timed.step()
    assert max(timed.gaps) <= 0.5
    prefill_s = sum(step_seconds(p) for p in timed.plans if p.kind == "prefill")
    decode_s = sum(step_seconds(p) for p in timed.plans if p.kind == "decode")
    assert min(prefill_s, decode_s) > 5.0
    order = list(timed.first_tokens)
    assert order == sorted(order, key=lambda name: int(name[1:])), "first come, first served"


def uneven(plan: StepPlan) -> float:
    """Of seven layers two cost nearly nothing, and every second of the others three times more."""
    weights = (0.1, 0.1, 3.0, 1.0, 3.0, 1.0, 3.0)
    share = sum(weights[slice(*plan.layers)]) / sum(weights)
    whole = step_seconds(replace(plan, layers=(0, NUM_LAYERS)))
    return whole if plan.kind == "decode" else share * whole


@pytest.mark.parametrize("bound_s", [1.2, 0.6], ids=str)
def test_layers_that_cost_different_times_are_learned(bound_s: float) -> None:
    timed = attack(replace(SEED_LIMITS, num_layers=7), uneven, max_decode_gap_s=bound_s)
    late = [gap for gap in timed.gaps if gap > 0.02][10:]
    assert len(late) > 30
    assert max(late) <= bound_s
    assert sum(gap > bound_s for gap in timed.gaps) <= 2, "while layers are taken to be alike"
    assert wall(timed) <= 1.06 * 76.4


def test_rows_that_a_chunk_adds_are_in_the_decode_that_follows() -> None:
    """A decode of `r` rows takes 5 + 10 r ms; three prompts join one stream at once. Their chunk
    of 60 ms fits before a decode of one row, not before one of four."""

    def seconds(plan: StepPlan) -> float:
        if plan.kind == "decode":
            return 0.005 + 0.010 * len(plan.seqs)
        return 0.060 * (plan.layers[1] - plan.layers[0]) / NUM_LAYERS

    timed = Timed(replace(SEED_LIMITS, max_decode_gap_s=0.1), seconds)
    for number in range(4):  # lets it see decodes of one to four rows
        timed.submit(f"early{number}", 100, 20 + 20 * number)
    timed.run()
    timed.submit("victim", 100, 60)
    timed.run(until=timed.now + 0.3)
    timed.gaps.clear()
    for number in range(3):
        timed.submit(f"late{number}", 100, 30)
    timed.run()
    assert max(len(plan.seqs) for plan in timed.plans[-40:]) == 4
    assert max(timed.gaps) <= 0.1
