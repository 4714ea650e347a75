"""Step costs: expectations are the formula, worked out by hand.

Mutants tried and seen red: context counted to the end of the part, the fixed cost paid once a
prompt, a slice that costs a whole chunk, a negative or endless number let through, noise that only
slows, and noise of half the share.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from ftruntime.sim.cost import SEED_COST, StepCost, StepNoise
from ftruntime.types import SeqPlan, StepKind, StepPlan

COST = StepCost(2.0, 0.5, 0.25, 0.125)


def plan_of(
    *parts: tuple[int, int], kind: StepKind = "prefill", layers: tuple[int, int] = (0, 4)
) -> StepPlan:
    """A step of parts `(start, tokens)` of a model of four layers."""
    seqs = tuple(
        SeqPlan(row, f"r{row}", start, (0,) * count) for row, (start, count) in enumerate(parts)
    )
    return StepPlan(0, kind, seqs, layers)


@pytest.mark.parametrize(
    ("plan", "seconds"),
    [
        (plan_of((0, 10)), 2 + 10 * 0.5),
        (plan_of((8, 3)), 2 + 3 * (0.5 + 0.25 * 8)),
        (plan_of((8, 3), (0, 4)), 2 + 3 * (0.5 + 0.25 * 8) + 4 * 0.5),
        (plan_of((8, 4), layers=(1, 2)), (2 + 4 * (0.5 + 0.25 * 8)) / 4),
        (plan_of((7, 1), (900, 1), kind="decode"), 0.125),
    ],
)
def test_a_step_costs_what_the_formula_says(plan, seconds):
    assert COST.step_s(plan, 4) == pytest.approx(seconds, rel=1e-12)


def test_slices_add_up_to_their_chunk():
    edges = [0, 3, 4, 17, 43]
    slices = [
        SEED_COST.step_s(plan_of((256, 999), layers=(first, last)), 43)
        for first, last in pairwise(edges)
    ]
    assert sum(slices) == pytest.approx(SEED_COST.prefill_s([(999, 256)]), rel=1e-12)


def test_a_chunk_of_several_prompts():
    assert COST.prefill_s([(10, 0), (3, 8)]) == 2 + 10 * 0.5 + 3 * (0.5 + 0.25 * 8)


def factors(share: float, seed: int, num: int) -> list[float]:
    noise = StepNoise(share, seed)
    return [noise.factor() for _ in range(num)]


def test_noise_is_uniform_about_the_cost():
    found = factors(0.3, 1, 20_000)
    assert 0.7 <= min(found) < 0.701
    assert 1.299 < max(found) <= 1.3
    # a uniform variable of half width w has mean 1 and standard deviation w / sqrt(3)
    assert fmean(found) == pytest.approx(1.0, abs=4 * 0.3 / math.sqrt(3 * 20_000))
    assert pstdev(found) == pytest.approx(0.3 / math.sqrt(3), rel=0.02)
    assert sum(factor < 0.85 for factor in found) / 20_000 == pytest.approx(0.25, abs=0.015)


def test_noise_comes_from_its_seed():
    assert factors(0.3, 7, 50) == factors(0.3, 7, 50)
    assert factors(0.3, 7, 50) != factors(0.3, 8, 50)
    assert factors(0.0, 7, 50) == [1.0] * 50


def test_parse():
    assert StepCost.parse("0.262,0.200e-3,1.08e-9,0.0168") == SEED_COST
    assert StepCost.parse(str(SEED_COST)) == SEED_COST
    assert StepCost.parse("0,0,0,0") == StepCost(0, 0, 0, 0)
    assert StepCost.parse("1e6,1e6,1e6,1e6") == StepCost(*[1e6] * 4)


@pytest.mark.parametrize(
    "text", ["", "1,2", "1,2,3,4,5", "1,2,3,x", "1,2,3,-4", "1,nan,3,4", "inf,2,3,4",
     "1e308,1,1,1", "1,1000001,1,1"],
)  # fmt: skip
def test_refusals(text):
    with pytest.raises(ValueError, match=r"^--cost is .*, expected four numbers in \[0, 1000000\]"):
        StepCost.parse(text)
