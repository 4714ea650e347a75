"""Step costs: expectations are the formula, worked out by hand.

Mutants tried and seen red: context counted to the end of the part, the fixed cost paid once a
prompt, a slice that costs a whole chunk, a negative or endless number let through, noise that only
slows, and noise of half the share; modelled steps that are decode where prefill is meant, of other
contexts, of the first sequence only, or take the other total.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from ftruntime.config import DeviceFacts, RuntimeConfig, resolve
from ftruntime.model.config import builtin
from ftruntime.sim.cost import SEED_COST, ModelledCost, StepCost, StepNoise
from ftruntime.step_model import RTX_4090, StepModel
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


@pytest.fixture(scope="module")
def model() -> StepModel:
    """The model of eight cards."""
    config, flash = RuntimeConfig.from_flags(tp=8, moe_cache_rate=0.5), builtin("flash")
    facts = DeviceFacts(kind="cuda", cards=8, memory_bytes=24 << 30)
    return StepModel(config, flash, resolve(config, flash, facts), RTX_4090)


def test_modelled_steps_are_those_of_inspect(model):
    bare, hidden = ModelledCost(model, "sum"), ModelledCost(model, "overlapped")
    chunk, rows = model.prefill(3000, 33000), model.decode(3, 901)
    # two totals that differ by much
    assert chunk.overlapped_s < 0.9 * chunk.sum_s
    for cost, chunk_s, rows_s in (
        (bare, chunk.sum_s, rows.sum_s), (hidden, chunk.overlapped_s, rows.overlapped_s),
    ):  # fmt: skip
        assert cost.step_s(plan_of((30000, 3000)), 4) == pytest.approx(chunk_s)
        assert cost.step_s(plan_of((30000, 3000), layers=(1, 2)), 4) == pytest.approx(chunk_s / 4)
        assert cost.prefill_s([(3000, 30000)]) == pytest.approx(chunk_s)
        assert cost.step_s(plan_of(*[(900, 1)] * 3, kind="decode"), 4) == pytest.approx(rows_s)
    assert hidden.first_decode_s(3) == pytest.approx(model.decode(3, 1).overlapped_s)


def test_several_prompts_of_a_modelled_step_share_what_the_batch_reads(model):
    one, other, both = (
        model.step(parts, decode=False)
        for parts in ([(1000, 0)], [(500, 60000)], [(1000, 0), (500, 60000)])
    )
    assert both.compute_s == pytest.approx(one.compute_s + other.compute_s)
    assert both.tokens == 1500
    # weights and experts cross once for both
    assert max(one.bus_s, other.bus_s) <= both.bus_s < 1.05 * one.bus_s
    assert one.memory_s < both.memory_s < 1.1 * one.memory_s


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
