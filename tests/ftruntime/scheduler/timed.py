"""A scheduler on a virtual clock: steps take what a formula says; gaps are as in `steplog`.

The formula is that of the report the project started from, given and not timed here: a chunk of
`c` tokens at context `x` takes `0.262 + c * (0.200e-3 + 1.08e-9 * x)` s in 43 layers, a slice its
share of them, a decode step 16.8 ms.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.types import (
    Request,
    SamplingParams,
    SchedulerLimits,
    SeqResult,
    StepPlan,
    StepResult,
)

NUM_LAYERS = 43
FIXED_S, TOKEN_S, CONTEXT_S, DECODE_S = 0.262, 0.200e-3, 1.08e-9, 16.8e-3
SEED_LIMITS = SchedulerLimits(
    num_pages=2560, window_pages=308, chunk_tokens=3456, max_running=50, max_model_len=327_680,
    num_layers=NUM_LAYERS,
)  # fmt: skip


def step_seconds(plan: StepPlan) -> float:
    if plan.kind == "decode":
        return DECODE_S
    tokens = (len(s.token_ids) * (TOKEN_S + CONTEXT_S * s.start) for s in plan.seqs)
    return (FIXED_S + sum(tokens)) * (plan.layers[1] - plan.layers[0]) / NUM_LAYERS


def noisy(share: float, seed: int = 0) -> Callable[[StepPlan], float]:
    """Every step takes up to this share more or less."""
    rng = random.Random(seed)
    return lambda plan: step_seconds(plan) * rng.uniform(1 - share, 1 + share)


@dataclass
class Timed:
    """Drives a scheduler; `gaps` are those between ends of decode steps while a row can decode."""

    limits: SchedulerLimits
    seconds: Callable[[StepPlan], float] = step_seconds
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)
    first_tokens: dict[str, float] = field(default_factory=dict)
    decodable: set[str] = field(default_factory=set)
    gap_start: float | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)

    def submit(self, name: str, num_prompt: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
        self.scheduler.submit(Request(name, (5,) * num_prompt, params, self.now))

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return None
        self.plans.append(plan)
        self.now += self.seconds(plan)
        seqs: tuple[SeqResult, ...] = ()
        if plan.layers[1] == self.limits.num_layers:
            seqs = tuple(
                SeqResult(s.row, s.request_id, None if s.sample is None else 7) for s in plan.seqs
            )
        events = self.scheduler.commit(plan, StepResult(plan.index, seqs), self.now)
        if plan.kind == "decode":
            if self.gap_start is not None:
                self.gaps.append(self.now - self.gap_start)
            self.gap_start = self.now
        for event in events:
            self.first_tokens.setdefault(event.request_id, self.now)
            if event.finish_reason is not None:
                self.ends[event.request_id] = self.now
                self.decodable.discard(event.request_id)
            else:
                self.decodable.add(event.request_id)
        if not self.decodable:
            self.gap_start = None
        elif self.gap_start is None:
            self.gap_start = self.now
        return plan

    def run(self, *, until: float = float("inf")) -> None:
        while self.now < until and self.step() is not None:
            pass


def attack(
    limits: SchedulerLimits = SEED_LIMITS,
    seconds: Callable[[StepPlan], float] = step_seconds,
    **policy: object,
) -> Timed:
    """A victim decodes; at 6 s a prompt of 200 019 tokens arrives; runs until that has ended."""
    timed = Timed(replace(limits, **policy), seconds)  # type: ignore[arg-type]
    timed.submit("victim", 17, 2000)
    timed.run(until=6.0)
    timed.submit("attacker", 200_019, 3)
    while "attacker" not in timed.ends:
        timed.step()
    return timed


def wall(timed: Timed) -> float:
    return timed.ends["attacker"] - 6.0
