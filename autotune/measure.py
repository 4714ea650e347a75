"""Times configs on a card, once their values are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.search import Problem, Trial
from autotune.values import disagreement
from ftkernels import KernelSpec, config, registry
from ftkernels.spec import Case, Inputs
from ftkernels.testing import timer
from ftkernels.testing.timer import Timer, num_bytes, num_sets


def measured(problem: Problem, record: object, card: Timer) -> Trial:
    """Median microseconds of a call with `record`, in every case of a problem.

    Values come first: a config under which the op and its reference differ is not timed.
    """
    by_name = {spec.name: spec for spec in registry()}
    us = []
    for op, case in problem.users:
        with config.pin(problem.op, record, key=problem.key):
            if disagreement(by_name[op], case, device=card.device):
                return Trial(error="gives wrong values")
            us.append(round(median_us(by_name[op], case, card), 4))
    return Trial(tuple(us))


def median_us(spec: KernelSpec, case: Case, card: Timer) -> float:
    """Median microseconds of a call of an op as it is looked up now."""
    first = spec.inputs(case, device=card.device, seed=0)
    count = num_sets(num_bytes(first), card.l2_bytes)
    others = [spec.inputs(case, device=card.device, seed=seed) for seed in range(1, count)]
    replay = card.graph([_call(spec, inputs) for inputs in (first, *others)])
    return timer.median_us(replay, count)


def _call(spec: KernelSpec, inputs: Inputs) -> Callable[[], Any]:
    args, kwargs = inputs
    return lambda: spec.op(*args, **kwargs)
