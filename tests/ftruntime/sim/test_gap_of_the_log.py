"""The loop's largest decode gap leaves out requests that gave their pages up.

Under a virtual clock; the expectation is counted beside the loop, from the rows that can decode.
Mutant run, noticed: retracted requests kept among those that can decode.
"""

from __future__ import annotations

import pytest

from ftruntime.engine.loop import EngineLoop
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.sim.clock import VirtualClock
from ftruntime.sim.cost import SEED_COST
from ftruntime.sim.executor import SimExecutor
from ftruntime.types import Request, SamplingParams, SchedulerLimits


@pytest.mark.parametrize("bound_s", [None, 1.0])
def test_a_retracted_request_waits_in_no_decode_gap(bound_s: float | None) -> None:
    """`b` waits from its retraction to the end of `a`, and its 23 pages are computed again."""
    limits = SchedulerLimits(
        num_pages=32, window_pages=64, chunk_tokens=128, max_running=2, max_model_len=1 << 20,
        num_layers=43, max_decode_gap_s=bound_s, admission="optimistic",
    )  # fmt: skip
    clock, scheduler = VirtualClock(), Scheduler(limits)
    loop = EngineLoop(
        scheduler, SimExecutor(clock, SEED_COST, 43), clock, info={}, decode_log_interval=1 << 30
    )
    for name, prompt, output in (("a", 256, 1500), ("b", 2800, 1000)):
        params = SamplingParams(max_tokens=output, seed=0, ignore_eos=True)
        loop.submit(Request(name, (5,) * prompt, params, 0.0))
    largest_s, start_s = 0.0, None
    while loop.has_work:
        loop.step()
        kind = loop.steps(loop.num_steps - 1)["steps"][-1]["kind"]  # type: ignore[index]
        if kind == "decode":
            largest_s = max(largest_s, clock.now() - (start_s or clock.now()))
            start_s = clock.now()
        if not scheduler._decode.rows:
            start_s = None
        elif start_s is None:
            start_s = clock.now()
    stats = loop.stats()
    assert stats["retractions"] == 1
    assert stats["largest_gap_ms"] == pytest.approx(1e3 * largest_s, abs=0.01)
    assert bound_s is None or largest_s <= bound_s
