"""The simulated executor and its clock.

Mutants tried and seen red: results with every slice, a chunk counted once a slice, a span that ends
with its first step, a clock that goes back, noise before time 0, one factor for all steps.
"""

from __future__ import annotations

import pytest

from ftruntime.sim.clock import VirtualClock
from ftruntime.sim.cost import StepCost, StepNoise
from ftruntime.sim.executor import PrefillSpan, SimExecutor
from ftruntime.types import SampleSpec, SeqPlan, SeqResult, StepPlan

DRAW = SampleSpec(0.0, 0, 1.0, 0.0, 0, 1)


def seq(name: str, start: int, count: int, *, draws: bool) -> SeqPlan:
    return SeqPlan(0, name, start, (0,) * count, sample=DRAW if draws else None)


def test_steps_take_their_time_and_spans_are_kept():
    clock = VirtualClock(-3.0)
    executor = SimExecutor(clock, StepCost(4.0, 1.0, 0.0, 0.5), num_layers=2)
    first = StepPlan(0, "prefill", (seq("a", 0, 4, draws=False),), (0, 1))
    assert executor.execute(first).seqs == ()
    assert clock.now() == -3 + 8 / 2
    second = StepPlan(1, "prefill", (seq("a", 0, 4, draws=False),), (1, 2))
    assert executor.execute(second).seqs == (SeqResult(0, "a", None),)
    decode = StepPlan(2, "decode", (seq("b", 9, 1, draws=True),), (0, 2))
    (drawn,) = executor.execute(decode).seqs
    assert drawn.token_id is not None
    last = StepPlan(3, "prefill", (seq("a", 4, 2, draws=True),), (0, 2))
    (drawn,) = executor.execute(last).seqs
    assert drawn.token_id is not None
    assert clock.now() == -3 + 8 + 0.5 + 6
    assert executor.prefills == {"a": PrefillSpan(-3.0, 11.5, num_chunks=2, num_slices=3)}


def test_noise_begins_at_time_0_and_is_drawn_for_each_step():
    clock, expected = VirtualClock(-2.5), StepNoise(0.5, 3)
    executor = SimExecutor(clock, StepCost(9.0, 1.0, 0.0, 2.0), 2, StepNoise(0.5, 3))
    decode = StepPlan(0, "decode", (seq("b", 9, 1, draws=True),), (0, 2))
    for wanted in (-0.5, 1.5, 1.5 + 2 * (first := expected.factor())):
        executor.execute(decode)
        assert clock.now() == pytest.approx(wanted, rel=1e-12)
    prefill = StepPlan(1, "prefill", (seq("a", 0, 4, draws=True),), (0, 2))
    executor.execute(prefill)
    assert clock.now() == pytest.approx(1.5 + 2 * first + 13 * expected.factor(), rel=1e-12)
    assert clock.now() == executor.prefills["a"].end_s


def test_the_clock_never_goes_back():
    clock = VirtualClock()
    clock.advance(2.0)
    clock.wait_until(1.0)
    assert clock.now() == 2.0
    clock.wait_until(3.5)
    assert clock.now() == 3.5
    with pytest.raises(ValueError, match="seconds is -1, expected >= 0"):
        clock.advance(-1)
