"""Random runs with the prefix cache: arrivals, aborts, failing steps, layer slices, hits.

The executor of `support` is given pools that remember by what prefix each page was written, so a
request may start behind another one's pages, and nowhere else. P05, P06: whenever a request goes,
its pages are back, or kept for others.

Mutants run, each noticed: pages kept when their part is planned; a hit for a prompt whose
log-probabilities are wanted; the cached count left out of the event; a hit that is computed again;
a part planned without its hit; admission that does not see what is shared.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ftruntime.kvcache.layout import min_window_pages
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.types import (
    Admission,
    Request,
    RequestRejectedError,
    SamplingParams,
    SchedulerLimits,
    SeqPlan,
    StepPlan,
    TokenEvent,
)
from tests.ftruntime.scheduler.support import EOS, Bench, CheckingExecutor, make_limits

STEPS = 2500


class PrefixExecutor(CheckingExecutor):
    """Pages hold (logical page, number of the prefix that ends with its newest token)."""

    def _enter(self, seq: SeqPlan) -> None:
        if seq.fresh:
            self._begin(seq)
        life = self.holder[seq.row]
        for logical, window_page, row_page in seq.new_pages:
            assert logical == len(self.tables[life])
            assert (window_page == -1) == (logical < seq.start // 128 - 1)
            self.tables[life][logical] = (window_page, row_page)
        tokens = self.done[life]
        assert seq.start == len(tokens)
        self._check_rows(life, seq.start)  # before anything is written
        tokens.extend(seq.token_ids)
        prompt = self.requests[seq.request_id].prompt_token_ids
        assert tokens == [*prompt, *self.drawn[life]][: len(tokens)]

    def _write(self, seq: SeqPlan) -> None:
        life = self.holder[seq.row]
        end = len(self.done[life])
        for logical in range(seq.start // 128, (end - 1) // 128 + 1):
            window_page, row_page = self.tables[life][logical]
            content = self._content(life, logical, end)
            self.window_owner[window_page] = self.row_owner[row_page] = content

    def _check_visible(self, seq: SeqPlan) -> None:
        self._check_rows(self.holder[seq.row], seq.start + len(seq.token_ids))

    def _check_rows(self, life: int, end: int) -> None:
        table = self.tables[life]
        for logical in range((end + 127) // 128):
            content = self._content(life, logical, end)
            assert self.row_owner[table[logical][1]] == content
            if logical >= max(0, end - 127) // 128:
                assert self.window_owner[table[logical][0]] == content

    def _content(self, life: int, logical: int, end: int) -> tuple[int, int]:
        return logical, hash(tuple(self.done[life][: min(end, 128 * logical + 128)]))


class PrefixRun:
    def __init__(self, limits: SchedulerLimits, seed: int, make: type[Scheduler]) -> None:
        self.rng = random.Random(seed)
        # optimistic: outputs of several pages that outgrow what was there when they were admitted
        optimistic = limits.admission == "optimistic"
        self.max_output, self.rate = (1000, 0.1) if optimistic else (200, 1.0)
        self.bench = Bench(limits, scheduler=make(limits))
        self.bench.executor = PrefixExecutor(limits, self._choose)
        self.now = 0.0
        self.over: list[int] = []
        self.started: dict[str, int] = {}  # where a request's first part began
        self.submitted: list[str] = []
        self.ended: set[str] = set()
        self.seen = {"hit": 0, "cold": 0, "abort": 0, "fail": 0, "slice": 0}

    def _choose(self, request_id: str, position: int) -> int:
        return EOS if self.rng.random() < 0.01 * self.rate else 30 + position % 3

    def prompt(self) -> list[int]:
        if self.over and self.rng.random() < 0.2:
            return self.over[:1200] + [9] * self.rng.randint(1, 9)
        tokens = [self.rng.choice((11, 12, 13))] * (128 * self.rng.randint(0, 7) + 1)
        tokens += [self.rng.choice((14, 15))] * self.rng.choice((0, 3, 126, 127, 128, 300))
        return tokens

    def arrive(self) -> None:
        name = f"r{len(self.submitted)}"
        wanted = 0 if self.rng.random() < 0.1 else None
        params = SamplingParams(
            max_tokens=self.rng.randint(1, self.max_output), seed=1, prompt_logprobs=wanted
        )
        try:
            self.bench.submit(Request(name, tuple(self.prompt()), params, arrival_s=self.now))
        except RequestRejectedError:
            return
        self.submitted.append(name)

    def abort(self, name: str) -> None:
        event = self.bench.scheduler.cancel(name)
        if event is not None:
            self.note([event])
            self.seen["abort"] += 1

    def note(self, events: list[TokenEvent]) -> None:
        for event in events:
            request = self.bench.executor.requests[event.request_id]
            if event.token_id is not None:
                assert event.num_cached_tokens == self.started[event.request_id]
            if event.finish_reason is not None:
                assert event.request_id not in self.ended
                self.ended.add(event.request_id)
                if event.finish_reason in ("stop", "length"):
                    drawn = [e.token_id for e in self.bench.events.get(event.request_id, [])]
                    drawn.append(event.token_id)
                    self.over = [*request.prompt_token_ids, *(t for t in drawn if t is not None)]

    def step(self) -> None:
        plan = self.bench.scheduler.plan(self.now)
        if plan is None:
            return
        self.look(plan)
        if self.rng.random() < 0.05 * self.rate:
            self.abort(self.rng.choice(plan.seqs).request_id)
        self.now += self.rng.random() * 0.01
        if self.rng.random() < 0.01 * self.rate:
            self.note(self.bench.scheduler.fail(plan, "no", self.now))
            self.seen["fail"] += 1
            return
        result = self.bench.executor.execute(plan)
        events = self.bench.scheduler.commit(plan, result, self.now)
        self.note(events)
        self.bench.keep(events)

    def look(self, plan: StepPlan) -> None:
        self.seen["slice"] += plan.layers != (0, 3)
        for seq in plan.seqs:
            if seq.fresh and seq.request_id not in self.started:
                self.started[seq.request_id] = seq.start
                self.seen["hit" if seq.start else "cold"] += 1
                params = self.bench.executor.requests[seq.request_id].params
                assert seq.start == 0 or params.prompt_logprobs is None

    def operate(self) -> None:
        draw = self.rng.random()
        if draw < 0.12:
            self.arrive()
        elif draw > 1 - 0.005 * self.rate and self.submitted:
            self.abort(self.submitted[-1])
        else:
            self.step()
        if self.rng.random() < 0.05:
            self.bench.scheduler.check()

    def drain(self) -> None:
        for _ in range(30_000):
            if not self.bench.scheduler.has_work:
                break
            self.step()
        self.bench.check_empty()
        assert sorted(self.ended) == sorted(self.submitted), "every request ends"


RUNS = [
    # N, gap, G, chunk, rows, pages
    (None, None, None, 256, 4, 30),
    (1, None, None, 128, 3, 14),
    (2, None, 3, 384, 4, 40),
    (None, 0.02, None, 256, 5, 24),
    (3, 0.05, 2, 512, 4, 60),
]


def prefix_run(
    seed: int, make: type[Scheduler] = Scheduler, admission: Admission = "reserve"
) -> PrefixRun:
    every, gap_s, groups, chunk, rows, pages = RUNS[seed]
    if admission == "optimistic":
        rows, pages = max(rows, 4), 12
    limits = make_limits(
        num_pages=pages,
        window_pages=min_window_pages(max_running=rows, chunk_tokens=chunk) + seed,
        chunk_tokens=chunk, max_running=rows, max_model_len=1500, every=every, gap_s=gap_s,
        groups=groups, admission=admission, max_waiting_requests=20,
    )  # fmt: skip
    run = PrefixRun(replace(limits, prefix_cache=True), seed, make)
    for _ in range(STEPS):
        run.operate()
    run.drain()
    return run


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
@pytest.mark.parametrize("seed", range(len(RUNS)))
def test_p05_p06_random_operations_with_hits(seed: int, admission: Admission) -> None:
    """The window pool is the smallest that is allowed, or a few pages more."""
    run = prefix_run(seed, admission=admission)
    retracted = run.bench.scheduler.stats()["retractions"]
    assert isinstance(retracted, int)
    assert (retracted > 0) == (admission == "optimistic")
    sliced = RUNS[seed][1] is not None or (RUNS[seed][2] or 1) > 1
    assert (run.seen.pop("slice") > 0) == sliced or admission == "optimistic"
    assert min(run.seen.values()) > 0, run.seen


def bench_of(**limits: int) -> Bench:
    made = replace(make_limits(**{"chunk_tokens": 256, **limits}), prefix_cache=True)
    bench = Bench(made)
    bench.executor = PrefixExecutor(made)
    return bench


def request_of(name: str, prompt: list[int], max_tokens: int = 2, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, **params)  # type: ignore[arg-type]
    return Request(name, tuple(prompt), sampling, arrival_s=0.0)


def test_a_hit_is_taken_when_the_prompt_is_admitted_not_when_it_arrives() -> None:
    """The second prompt waits for a row; by then the first one's pages are there."""
    bench = bench_of(max_running=1)
    text = [token // 128 for token in range(700)]
    for name in ("a", "b"):
        bench.submit(request_of(name, text))
    bench.drain()
    firsts = {plan.seqs[0].request_id: plan.seqs[0].start for plan in reversed(bench.plans)}
    assert firsts == {"a": 0, "b": 640}
    assert [event.num_cached_tokens for event in bench.events["b"]] == [640, 640]
    assert bench.trace == "pppdpd"


def test_what_is_left_of_several_hits_shares_a_chunk() -> None:
    bench = bench_of()
    text = [token // 128 for token in range(700)]
    bench.submit(request_of("a", text))
    bench.drain()
    for number in range(4):
        bench.submit(request_of(f"b{number}", text))
    assert bench.steps(1) == "p"
    assert [len(seq.token_ids) for seq in bench.plans[-1].seqs] == [60] * 4
    assert bench.scheduler.stats()["used_pages"] == 5 + 4, "shared pages count once"
    bench.drain()


def test_a_prompt_fits_beside_the_pages_it_shares() -> None:
    bench = bench_of(num_pages=8)
    text = [token // 128 for token in range(700)]
    bench.submit(request_of("a", text, max_tokens=60))
    bench.steps(3)
    assert bench.scheduler.stats()["num_running"] == 1
    bench.submit(request_of("b", text, max_tokens=60))  # 6 pages, 2 are free
    assert bench.steps(1) == "p"
    assert bench.scheduler.stats()["num_running"] == 2
    bench.drain()
