"""Times calls on a card: inputs in rotation, graph replays, the median.

One set of inputs would stay in L2 between calls, as no layer's does in a step. So a graph holds one
call for each of several sets, more than the cache takes, and a replay is timed as a whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ftkernels.spec import Inputs

REPLAYS = 20
_WARM_UP = 3
_MOST_SETS = 64
Calls = Sequence[Callable[[], object]]


class Timer(Protocol):
    """The card, as far as timing goes."""

    device: str
    l2_bytes: int

    def graph(self, calls: Calls) -> Callable[[], float]:
        """Record the calls; each call of the result runs them once and gives milliseconds."""


class CudaTimer:
    """The current CUDA device."""

    device = "cuda"

    def __init__(self) -> None:
        self.l2_bytes = int(torch.cuda.get_device_properties().L2_cache_size)

    def graph(self, calls: Calls) -> Callable[[], float]:
        _run(calls)  # compiles, and allocates what a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run(calls)
        return _between_events(graph.replay)

    def eager(self, calls: Calls) -> Callable[[], float]:
        """As `graph` for calls that no graph can hold; starting them from the host counts too."""
        _run(calls)
        return _between_events(lambda: _run(calls))


def _run(calls: Calls) -> None:
    for call in calls:
        call()


def _between_events(run: Callable[[], None]) -> Callable[[], float]:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)

    def timed() -> float:
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return timed


def median_us(replay: Callable[[], float], count: int, *, replays: int = REPLAYS) -> float:
    """Median microseconds of one of `count` calls, from the milliseconds of all of them."""
    for _ in range(_WARM_UP):
        replay()
    return 1000 * statistics.median(replay() for _ in range(replays)) / count


def num_sets(bytes_each: int, l2_bytes: int) -> int:
    """Sets of inputs that are together twice as large as the cache; at least two, at most 64."""
    return max(2, min(_MOST_SETS, math.ceil(2 * l2_bytes / max(1, bytes_each))))


def num_bytes(inputs: Inputs) -> int:
    """Bytes of the tensors of a call."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))
