"""60 000 random operations on a virtual clock: layer slices, gap bounds, interleave numbers.

Steps take `fixed + tokens * (b + d * context)`, slices their share; arrivals, aborts at any moment
and failing steps come at random. Pages are checked by the executor in `support`.

Mutants that must fail stand at the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from ftruntime.kvcache.pages import OutOfPagesError
from ftruntime.types import Admission, SchedulerLimits, StepPlan, TokenEvent
from tests.ftruntime.scheduler.support import EOS, Bench, Watched, make_limits, make_request

OPERATIONS = 6000
NUM_LAYERS = 7
FIXED_S, TOKEN_S, CONTEXT_S, DECODE_S, ROW_S = 0.05, 2e-4, 1e-8, 0.006, 0.001
RUNS = [
    # N, S, G, chunk, rows, pages
    (None, None, 2, 512, 4, 40),
    (None, None, 7, 384, 6, 16),
    (3, None, 3, 256, 3, 24),
    (2, None, 1, 512, 4, 40),
    (None, 0.15, None, 1024, 4, 40),
    (None, 0.06, None, 512, 6, 30),
    (2, 0.10, None, 512, 3, 24),
    (1, 0.08, None, 384, 5, 16),
    (None, 0.20, 1, 512, 4, 40),
    (4, 0.09, 3, 1024, 4, 64),
]


def limits_of(seed: int, admission: Admission = "reserve") -> SchedulerLimits:
    every, gap_s, groups, chunk, rows, pages = RUNS[seed]
    if admission == "optimistic":
        rows, pages = max(rows, 4), 12
    limits = make_limits(
        num_pages=pages,
        window_pages=2 * rows + (chunk // 128 - 1) + 1,
        chunk_tokens=chunk,
        max_running=rows,
        every=every,
        gap_s=gap_s,
        groups=groups,
        admission=admission,
        max_waiting_requests=20,
    )
    return replace(limits, num_layers=NUM_LAYERS)


@dataclass
class Stream:
    """A request as the outside sees it."""

    number: int
    decodes: bool = False
    chunks_waited: int = 0  # whole chunks since its last token
    slices_waited: int = 0


class SlicedRun:
    def __init__(
        self, seed: int, make: type[Watched] = Watched, admission: Admission = "reserve"
    ) -> None:
        self.limits = limits_of(seed, admission)
        self.rng = random.Random(seed)
        # optimistic: outputs of several pages that outgrow what was there when they were admitted
        self.optimistic = admission == "optimistic"
        self.max_output, self.rate = (1000, 0.05) if self.optimistic else (150, 1.0)
        scheduler = make(self.limits)
        scheduler.on_retract = self.retract
        self.bench = Bench(self.limits, scheduler=scheduler, choose=self._choose)
        self.bench.now = 0.0
        self.streams: dict[str, Stream] = {}
        self.num_submitted = 0
        self.num_ended = 0
        self.newest_started = -1
        self.gap_start: float | None = None
        self.gaps: list[float] = []
        self.last: StepPlan | None = None
        self.seen = {"fail": 0, "abort": 0, "abort between slices": 0, "decode between slices": 0}
        self.retracted: list[bool] = []  # whether a chunk was between two slices

    def _choose(self, request_id: str, position: int) -> int:
        return EOS if self.rng.random() < 0.02 * self.rate else 100 + position % 50

    def run(self) -> None:
        for _ in range(OPERATIONS):
            draw, wave = self.rng.random(), self.num_submitted // 60 % 2 == 0
            if draw < (0.25 if wave else 0.06) and self.bench.scheduler.num_waiting < 12:
                self.arrive()
            elif draw > 1 - 0.015 * self.rate and self.streams:
                self.abort(self.rng.choice(list(self.streams)))
            else:
                self.step()
            if self.rng.random() < 0.1:
                self.bench.scheduler.check()
        for _ in range(20_000):
            if not self.bench.scheduler.has_work:
                break
            self.step()
        self.bench.check_empty()
        assert self.num_ended == self.num_submitted, "every request ends"
        assert max(self.gaps) <= (self.limits.max_decode_gap_s or float("inf")), "gap bound"

    def arrive(self) -> None:
        name = f"r{self.num_submitted}"
        num_prompt = self.rng.choice([1, 127, 128, 129, 256, self.rng.randint(1, 1500)])
        num_prompt = min(num_prompt, self.limits.num_pages * 128 - self.max_output)
        num_output = self.rng.choice([1, 2, self.rng.randint(1, 150)])
        if self.optimistic:
            num_output = self.rng.randint(1, self.max_output)
        request = make_request(name, num_prompt, num_output)
        self.bench.submit(replace(request, arrival_s=self.bench.now or 0.0))
        self.streams[name] = Stream(self.num_submitted)
        self.num_submitted += 1

    def abort(self, name: str) -> None:
        event = self.bench.scheduler.cancel(name)
        assert event is not None
        self.seen["abort"] += 1
        self.seen["abort between slices"] += bool(self.bench.executor.kept)
        self.end([event])

    def retract(self, name: str) -> None:
        """It waits again, ahead of all that are younger."""
        stream = self.streams[name]
        assert stream.number == max(
            self.streams[s].number for s in self.bench.scheduler.request_ids
            if self.streams[s].number <= self.newest_started
        ), "the newest gives its pages up"  # fmt: skip
        stream.decodes, self.newest_started = False, stream.number - 1
        self.retracted.append(bool(self.bench.executor.kept))

    def step(self) -> None:
        unfinished = self.bench.scheduler.has_unfinished_prefill
        plan = self.bench.plan()
        assert (plan is None) == (not self.streams), "idle exactly when nothing is left"
        if plan is None:
            return
        self.check_order(plan, unfinished)
        self.bench.now = (self.bench.now or 0.0) + seconds(plan)
        if self.rng.random() < 0.1 * self.rate:  # aborts that arrive while the step runs
            names = [s.request_id for s in plan.seqs if s.request_id in self.streams]
            for name in self.rng.sample(names, self.rng.randint(1, len(names)) if names else 0):
                self.abort(name)
        if self.rng.random() < 0.01 * self.rate**0.5:
            self.fail(plan)
            events: list[TokenEvent] = []
        else:
            events = self.bench.finish(plan)
        self.measure(plan, events)
        self.last = plan

    def check_order(self, plan: StepPlan, unfinished: bool) -> None:
        """First come first served; a slice between two decodes that go before a prompt."""
        for seq in plan.seqs:
            if seq.fresh and plan.layers[0] == 0:
                number = self.streams[seq.request_id].number
                assert number > self.newest_started, "nobody passes"
                self.newest_started = number
        if self.last is not None and self.last.kind == "decode" and unfinished:
            assert plan.kind == "prefill", "decode never starves prefill"
        self.seen["decode between slices"] += plan.kind == "decode" and bool(
            self.bench.executor.kept
        )

    def fail(self, plan: StepPlan) -> None:
        events = self.bench.scheduler.fail(plan, "no", self.bench.now)
        hit = {seq.request_id for seq in plan.seqs} & self.streams.keys()
        assert {event.request_id for event in events} == hit
        self.seen["fail"] += 1
        self.end(events)

    def measure(self, plan: StepPlan, events: list[TokenEvent]) -> None:
        now = self.bench.now or 0.0
        if plan.kind == "decode":
            if self.gap_start is not None:
                self.gaps.append(now - self.gap_start)
            self.gap_start = now
        else:
            self.count_waits(plan)
        for event in events:
            if event.token_id is not None and event.finish_reason is None:
                stream = self.streams[event.request_id]
                stream.decodes, stream.chunks_waited, stream.slices_waited = True, 0, 0
        self.end(events)
        if self.gap_start is None and any(stream.decodes for stream in self.streams.values()):
            self.gap_start = now

    def count_waits(self, plan: StepPlan) -> None:
        every, groups = self.limits.decode_interleave_every, self.limits.prefill_layer_groups
        for stream in self.streams.values():
            if stream.decodes:
                stream.slices_waited += 1
                stream.chunks_waited += plan.layers[1] == NUM_LAYERS
                assert every is None or stream.chunks_waited <= every, "interleave bound"
                assert groups in (None, 1) or stream.slices_waited <= 1, "a decode after a slice"

    def end(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                del self.streams[event.request_id]
                self.num_ended += 1
        if not any(stream.decodes for stream in self.streams.values()):
            self.gap_start = None


def seconds(plan: StepPlan) -> float:
    if plan.kind == "decode":
        return DECODE_S + ROW_S * len(plan.seqs)
    tokens = sum(len(s.token_ids) * (TOKEN_S + CONTEXT_S * s.start) for s in plan.seqs)
    return (FIXED_S + tokens) * (plan.layers[1] - plan.layers[0]) / NUM_LAYERS


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
@pytest.mark.parametrize("seed", range(len(RUNS)))
def test_s01_s06_p05_p06_random_slices(seed: int, admission: Admission) -> None:
    run = SlicedRun(seed, admission=admission)
    run.run()
    assert bool(run.retracted) == (admission == "optimistic")
    sliced = run.limits.prefill_layer_groups != 1 and admission == "reserve"
    assert all(count > 0 for name, count in run.seen.items() if sliced or "between" not in name)
    assert len(run.gaps) > 300


class ForgetsTheFloor(Watched):
    """A decode goes first whenever rows can decode."""

    def plan(self, now: float) -> StepPlan | None:
        self._pace._last = "prefill"
        return super().plan(now)


class KeepsDroppedChunks(Watched):
    def _plan_prefill(self) -> StepPlan | None:
        self._chunks.take_drop()
        return super()._plan_prefill()


class NeverLearns(Watched):
    """Believes that steps take no time."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        assert self._pace._gap is not None
        cost = self._pace._gap._prefill_cost
        cost.predict = lambda work: 1e-9  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [
        (ForgetsTheFloor, 0),
        (KeepsDroppedChunks, 1),
        (NeverLearns, 5),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_schedulers_are_seen(mutant: type[Watched], seed: int) -> None:
    with pytest.raises((AssertionError, OutOfPagesError)):
        SlicedRun(seed, mutant).run()
