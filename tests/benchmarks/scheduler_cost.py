"""What the scheduler itself costs: microseconds of processor time for `plan` and `commit`.

Executor and clock are simulated; their time is not counted. Decode steps are timed at several
numbers of running and waiting requests and tokens of context; then all steps, while prompts of
20,000 tokens go through beside 49 streams, under each policy. Medians and 99th percentiles over the
steps; figures depend on the machine, their growth much less. Run it as ``make bench-scheduler`` or
``python -m tests.benchmarks.scheduler_cost``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ftruntime.kvcache.layout import min_window_pages
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.sim.clock import VirtualClock
from ftruntime.sim.cost import SEED_COST
from ftruntime.sim.executor import SimExecutor
from ftruntime.types import Request, SamplingParams, SchedulerLimits, StepKind

LAYERS = 43
CHUNK_TOKENS = 3456
# running, waiting, tokens of context of each running request
DECODES = (
    (1, 0, 500), (10, 0, 500), (50, 0, 500), (200, 0, 500), (50, 1000, 500), (50, 4000, 500),
    (50, 1000, 5000), (50, 1000, 20_000),
)  # fmt: skip
POLICIES: tuple[tuple[str, dict[str, int | float]], ...] = (
    ("unset", {}),
    ("N=8", {"decode_interleave_every": 8}),
    ("gap<=900ms", {"max_decode_gap_s": 0.9}),
    ("G=4", {"prefill_layer_groups": 4}),
)


@dataclass
class Bench:
    """A scheduler whose steps are timed, and which are."""

    scheduler: Scheduler
    clock: VirtualClock = field(default_factory=VirtualClock)
    next_name: Iterator[int] = field(default_factory=lambda: iter(range(1 << 40)))

    def __post_init__(self) -> None:
        self.executor = SimExecutor(self.clock, SEED_COST, LAYERS)

    def submit(self, num_prompt: int, max_tokens: int) -> None:
        number = next(self.next_name)
        params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        # prompts share no page
        prompt = (number + 1,) * num_prompt
        self.scheduler.submit(Request(f"r{number}", prompt, params, self.clock.now()))

    def step(self) -> tuple[StepKind, float]:
        """Kind and microseconds of plan and commit."""
        begin = time.thread_time()
        plan = self.scheduler.plan(self.clock.now())
        planned = time.thread_time()
        assert plan is not None
        result = self.executor.execute(plan)
        executed = time.thread_time()
        self.scheduler.commit(plan, result, self.clock.now())
        return plan.kind, 1e6 * (planned - begin + time.thread_time() - executed)


def limits(max_running: int, **policy: int | float) -> SchedulerLimits:
    window_pages = min_window_pages(max_running=max_running, chunk_tokens=CHUNK_TOKENS)
    return SchedulerLimits(
        num_pages=1 << 17, window_pages=2 * window_pages, chunk_tokens=CHUNK_TOKENS,
        max_running=max_running, max_model_len=1 << 20, num_layers=LAYERS,
        max_waiting_requests=1 << 30, **policy,  # type: ignore[arg-type]
    )  # fmt: skip


def decode_steps(running: int, waiting: int, context: int, num_steps: int) -> list[float]:
    """Microseconds of each decode step with every row taken."""
    bench = Bench(Scheduler(limits(running)))
    for _ in range(running):
        bench.submit(context, num_steps + 10)
    while bench.scheduler.has_unfinished_prefill:
        bench.step()
    for _ in range(waiting):
        bench.submit(500, 100)
    steps = [bench.step() for _ in range(num_steps)]
    assert {kind for kind, _ in steps} == {"decode"}
    return [us for _, us in steps]


def mixed_steps(policy: dict[str, int | float], num_steps: int) -> dict[StepKind, list[float]]:
    """Microseconds by kind while prompts go through one row beside 49 streams; 1000 wait."""
    bench = Bench(Scheduler(limits(50, **policy)))
    for _ in range(49):
        bench.submit(500, num_steps + 100)
    while bench.scheduler.has_unfinished_prefill:
        bench.step()
    for _ in range(1000):
        bench.submit(20_000, 2)
    found: dict[StepKind, list[float]] = {"prefill": [], "decode": []}
    for _ in range(num_steps):
        kind, us = bench.step()
        found[kind].append(us)
    return found


def summary(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    last = statistics.quantiles(values, n=100)[-1]
    return f"{statistics.median(values):8.1f} {last:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=1000, help="Steps of each row. [default: 1000]"
    )
    num_steps = parser.parse_args().steps
    gc.disable()
    print("decode steps\nrunning  waiting  context   median us   99 % us")
    for running, waiting, context in DECODES:
        steps = decode_steps(running, waiting, context, num_steps)
        print(f"{running:7d}  {waiting:7d}  {context:7d}    {summary(steps)}")
        gc.collect()
    print("\n49 streams, prompts of 20000 tokens, 1000 waiting")
    print("policy      kind     median us   99 % us")
    for name, policy in POLICIES:
        for kind, values in mixed_steps(policy, num_steps).items():
            print(f"{name:10s}  {kind:7s}   {summary(values)}")
        gc.collect()


if __name__ == "__main__":
    main()
