"""Times configs on a card: inputs in rotation, graph replays, the median.

One set of inputs would stay in L2 between calls, as no layer's does in a step. So a graph holds one
call for each of several sets, more than the cache takes, and a replay is timed as a whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autotune.search import Problem, Trial
from autotune.values import disagreement
from ftkernels import KernelSpec, config, registry
from ftkernels.spec import Case, Inputs

REPLAYS = 20
_WARM_UP = 3
_MOST_SETS = 64


class Timer(Protocol):
    """The card, as far as timing goes."""

    device: str
    l2_bytes: int

    def graph(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        """Record the calls; each call of the result runs them once and gives milliseconds."""


class CudaTimer:
    """The current CUDA device."""

    device = "cuda"

    def __init__(self) -> None:
        self.l2_bytes = int(torch.cuda.get_device_properties().L2_cache_size)

    def graph(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        for call in calls:  # compiles, and allocates what a capture must not
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

        def replay() -> float:
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end))

        return replay


def measured(problem: Problem, record: object, timer: Timer) -> Trial:
    """Median microseconds of a call with `record`, in every case of a problem.

    Values come first: a config under which the op and its reference differ is not timed.
    """
    by_name = {spec.name: spec for spec in registry()}
    us = []
    for op, case in problem.users:
        with config.pin(problem.op, record, key=problem.key):
            if disagreement(by_name[op], case, device=timer.device):
                return Trial(error="gives wrong values")
            us.append(round(median_us(by_name[op], case, timer), 4))
    return Trial(tuple(us))


def median_us(spec: KernelSpec, case: Case, timer: Timer) -> float:
    """Median microseconds of a call of an op as it is looked up now."""
    first = spec.inputs(case, device=timer.device, seed=0)
    count = num_sets(num_bytes(first), timer.l2_bytes)
    others = [spec.inputs(case, device=timer.device, seed=seed) for seed in range(1, count)]
    replay = timer.graph([_call(spec, inputs) for inputs in (first, *others)])
    for _ in range(_WARM_UP):
        replay()
    return 1000 * statistics.median(replay() for _ in range(REPLAYS)) / count


def num_sets(bytes_each: int, l2_bytes: int) -> int:
    """Sets of inputs that are together twice as large as the cache; at least two, at most 64."""
    return max(2, min(_MOST_SETS, math.ceil(2 * l2_bytes / max(1, bytes_each))))


def num_bytes(inputs: Inputs) -> int:
    """Bytes of the tensors of a call."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))


def _call(spec: KernelSpec, inputs: Inputs) -> Callable[[], Any]:
    args, kwargs = inputs
    return lambda: spec.op(*args, **kwargs)
