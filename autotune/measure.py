"""Times configs on a card, once their values are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.errors import TritonError

from autotune.search import Problem, Trial
from autotune.values import disagreement
from autotune.workers import Stopped
from ftkernels import KernelSpec, config, registry
from ftkernels.spec import Case, Inputs
from ftkernels.testing import timer
from ftkernels.testing.timer import Timer, num_bytes, num_sets


def measured(problem: Problem, record: object, card: Timer) -> Trial:
    """Median microseconds of a call with `record`, in every case of a problem.

    Values come first: a config under which the op and its reference differ is not timed.

    Raises:
        Stopped: an error has left the card without use.
    """
    try:
        return _measured(problem, record, card)
    except (RuntimeError, TritonError) as error:  # also of memory that ran out, and of launches
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
    # only now is the memory free that the failed call held
    if not _works(card.device):
        raise Stopped(f"the card is lost at {problem.op} with {record}: {reason}")
    return Trial(error="does not run")


def _works(device: str) -> bool:
    """Whether a device still computes: an address out of bounds ends that for the process."""
    try:
        if device == "cuda":
            torch.cuda.empty_cache()
        return bool((torch.ones(1, device=device) + 1).item() == 2)
    except RuntimeError:
        return False


def _measured(problem: Problem, record: object, card: Timer) -> Trial:
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
