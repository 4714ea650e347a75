"""40 000 random operations against a small model: arrivals, aborts, failing steps.

The model knows the rules of admission and of the interleave number in a few lines and predicts
every step: its kind, its rows, who is admitted, and what every request ends with. Pages are checked
by the executor in `support`, which sees only plans.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ftruntime.kvcache.pages import OutOfPagesError
from ftruntime.types import Admission, RequestRejectedError, SchedulerLimits, StepPlan, TokenEvent
from tests.ftruntime.scheduler.support import EOS, Bench, Watched, make_limits, make_request

OPERATIONS = 4000
RUNS = [
    # N, chunk, rows, pages, max_model_len
    (None, 128, 4, 24, 1 << 20),
    (None, 512, 3, 12, 900),
    (1, 128, 4, 24, 1 << 20),
    (1, 384, 6, 16, 700),
    (2, 128, 2, 40, 1 << 20),
    (2, 256, 8, 30, 2000),
    (3, 128, 5, 10, 1 << 20),
    (3, 1024, 4, 64, 4000),
    (8, 128, 4, 64, 1 << 20),
    (8, 256, 1, 64, 1 << 20),
]


@dataclass
class Expected:
    """One request as the model sees it."""

    num_prompt: int
    max_tokens: int
    stage: str = "waiting"  # then prompt, decode
    promised: int = 0  # pages
    target: int = 0  # tokens to compute before the next one is drawn
    done: int = 0  # prompt tokens
    tokens: list[int] = field(default_factory=list)
    waited: int = 0  # prefill steps since its last token, while decodable

    @property
    def known(self) -> int:
        return self.num_prompt + len(self.tokens)


@dataclass
class Model:
    limits: SchedulerLimits
    live: dict[str, Expected] = field(default_factory=dict)
    listed: int = 0  # rows that joined the running set or were in the last decode
    streak: int = 0
    retracted: list[str] = field(default_factory=list)

    def waiting(self) -> list[str]:
        return [name for name, r in self.live.items() if r.stage == "waiting"]

    def decoding(self) -> list[str]:
        return [name for name, r in self.live.items() if r.stage == "decode"]

    def can_admit(self, name: str) -> bool:
        seated = len(self.seated())
        spare = seated if self.limits.admission == "optimistic" else 0
        fits = self.promise(self.live[name]) + spare <= self.free_pages()
        return seated < self.limits.max_running and fits

    def seated(self) -> list[str]:
        return [name for name, r in self.live.items() if r.stage != "waiting"]

    def free_pages(self) -> int:
        return self.limits.num_pages - sum(self.live[name].promised for name in self.seated())

    def promise(self, r: Expected) -> int:
        whole = r.num_prompt + r.max_tokens
        return pages_of(r.known if self.limits.admission == "optimistic" else whole)

    def make_room(self) -> None:
        for name in self.decoding():
            r = self.live[name]
            while r.stage == "decode" and pages_of(r.known) > r.promised:
                if self.free_pages() > 0:
                    r.promised += 1
                else:
                    newest = self.live[self.seated()[-1]]
                    self.retracted.append(self.seated()[-1])
                    self.listed -= newest.stage == "decode"
                    newest.stage, newest.done, newest.promised = "waiting", 0, 0

    def expect_status(self, num_tokens: int) -> int | None:
        """HTTP status that turns a new request away, or None."""
        if num_tokens > min(self.limits.max_model_len, self.limits.num_pages * 128):
            return 400
        num_waiting = len(self.waiting())
        num_free = self.limits.max_running - (len(self.live) - num_waiting)
        return 429 if num_waiting >= self.limits.max_waiting_requests + num_free else None

    def next_part(self) -> str | None:
        """The prompt that goes on or is admitted next: strictly by arrival."""
        unfinished = [name for name, r in self.live.items() if r.stage == "prompt"]
        if unfinished:
            (name,) = unfinished  # never more than one is partly prefilled
            return name
        waiting = self.waiting()
        return waiting[0] if waiting and self.can_admit(waiting[0]) else None

    def expect_plan(self) -> tuple[str, list[tuple[str, int, int]], bool]:
        """Kind, (request, start, tokens) of every row, interleaved."""
        every = self.limits.decode_interleave_every
        if every is not None and self.streak >= every and self.listed:
            self.make_room()
            self.streak, self.listed = 0, len(self.decoding())
            if self.listed:
                return "decode", self._decodes(), self.next_part() is not None
        parts = self._prefills()
        if parts:
            self.streak += 1
            return "prefill", parts, False
        assert self.decoding(), "work is left and nothing can run"
        self.make_room()
        self.streak, self.listed = 0, len(self.decoding())
        return "decode", self._decodes(), False

    def idle(self) -> None:
        """A plan was asked for and nothing lives: a decode of dead rows at most."""
        self.streak, self.listed = 0 if self.listed else self.streak, 0

    def _decodes(self) -> list[tuple[str, int, int]]:
        rows = [self.live[name] for name in self.decoding()]
        starts = [r.num_prompt + len(r.tokens) - 1 for r in rows]
        return [(name, start, 1) for name, start in zip(self.decoding(), starts, strict=True)]

    def _prefills(self) -> list[tuple[str, int, int]]:
        budget, parts = self.limits.chunk_tokens, []
        while (name := self.next_part()) is not None:
            r = self.live[name]
            if r.stage == "waiting":
                r.target = r.known
            rest = r.target - r.done
            count = rest if rest <= budget else budget // 128 * 128
            if count == 0:
                break
            if r.stage == "waiting":
                r.promised = self.promise(r)
            parts.append((name, r.done, count))
            r.done += count
            budget -= count
            r.stage = "prompt" if r.done < r.target else "planned"
            if r.stage == "prompt":
                break
        return parts

    def take(self, plan: StepPlan, events: list[TokenEvent]) -> None:
        """Tokens of a committed step; `plan` names rows that may have been cancelled meanwhile."""
        for event in events:
            assert event.token_id is not None
            r = self.live[event.request_id]
            r.tokens.append(event.token_id)
            full = r.num_prompt + len(r.tokens) >= self.limits.max_model_len
            reason = None
            if len(r.tokens) >= r.max_tokens or full:
                reason = "length"
            if event.token_id == EOS:
                reason = "stop"
            assert event.finish_reason == reason
            if reason is not None:
                del self.live[event.request_id]
                continue
            if r.stage == "planned":
                r.stage, self.listed = "decode", self.listed + 1
            r.waited = 0
        if plan.kind == "prefill":
            every = self.limits.decode_interleave_every
            drew = {event.request_id for event in events}
            for name in self.decoding():
                if name not in drew:
                    self.live[name].waited += 1
                    assert every is None or self.live[name].waited <= every, "interleave bound"


class RandomRun:
    def __init__(self, limits: SchedulerLimits, seed: int) -> None:
        self.rng = random.Random(seed)
        # optimistic: outputs of several pages that outgrow what was there when they were admitted
        self.optimistic = limits.admission == "optimistic"
        self.rate = 0.05 if self.optimistic else 1.0
        self.bench = Bench(limits, choose=self._choose)
        self.model = Model(limits)
        self.retracted: list[str] = []
        self.submitted: list[str] = []
        self.ended: dict[str, str] = {}
        self.seen: dict[str, int] = {"decode": 0, "prefill": 0, "fail": 0, "abort": 0, "reject": 0}

    def _choose(self, request_id: str, position: int) -> int:
        return EOS if self.rng.random() < 0.02 * self.rate else 100 + position % 50

    def operate(self) -> None:
        # arrivals come in waves, so that the server is both starved and flooded
        wave = len(self.submitted) // 60 % 2 == 0
        draw = self.rng.random()
        if draw < (0.4 if wave else 0.1):
            self.arrive()
        elif draw > 1 - 0.01 * self.rate and self.model.live:
            self.abort(self.rng.choice(list(self.model.live)))
        else:
            self.step()
        if self.rng.random() < 0.1:
            self.bench.scheduler.check()

    def arrive(self) -> None:
        name = f"r{len(self.submitted)}"
        num_prompt = self.rng.choice([1, 127, 128, 129, 256, self.rng.randint(1, 1500)])
        max_tokens = self.rng.choice([1, 2, self.rng.randint(1, 60), self.rng.randint(1, 300)])
        if self.optimistic:
            max_tokens = self.rng.randint(1, 1000)
        status = self.model.expect_status(num_prompt + max_tokens)
        request = make_request(name, num_prompt, max_tokens)
        if status is not None:
            with pytest.raises(RequestRejectedError) as caught:
                self.bench.submit(request)
            assert caught.value.status == status
            self.seen["reject"] += 1
            return
        self.bench.submit(request)
        self.model.live[name] = Expected(num_prompt, max_tokens)
        self.submitted.append(name)

    def abort(self, name: str) -> None:
        event = self.bench.scheduler.cancel(name)
        assert event is not None
        self.end([event])
        del self.model.live[name]
        self.seen["abort"] += 1

    def step(self) -> None:
        plan = self.bench.plan()
        assert (plan is None) == (not self.model.live), "idle exactly when nothing is left"
        if plan is None:
            self.model.idle()
            return
        self.seen[plan.kind] += 1
        got = [(seq.request_id, seq.start, len(seq.token_ids)) for seq in plan.seqs]
        assert (plan.kind, got, plan.interleaved) == self.model.expect_plan()
        if self.rng.random() < 0.1 * self.rate:  # aborts that arrive while the step runs
            for name, _, _ in self.rng.sample(got, self.rng.randint(1, len(got))):
                self.abort(name)
        if self.rng.random() < 0.02 * self.rate**0.5:
            self.fail(plan)
        else:
            events = self.bench.finish(plan)
            self.model.take(plan, events)
            self.end(events)

    def fail(self, plan: StepPlan) -> None:
        events = self.bench.scheduler.fail(plan, "no")
        hit = {seq.request_id for seq in plan.seqs} & self.model.live.keys()
        assert {event.request_id for event in events} == hit
        assert all(event.finish_reason == "error" for event in events)
        self.end(events)
        for name in hit:
            del self.model.live[name]
        self.seen["fail"] += 1

    def end(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ended, "an event after the end"
            if event.finish_reason is not None:
                self.ended[event.request_id] = event.finish_reason

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.bench.scheduler.has_work:
                break
            self.step()
        self.bench.check_empty()
        assert sorted(self.ended) == sorted(self.submitted), "every request ends"


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens // 128)


def tight_limits(seed: int, admission: Admission = "reserve") -> SchedulerLimits:
    every, chunk, rows, pages, max_model_len = RUNS[seed]
    if admission == "optimistic":
        rows, pages = max(rows, 4), 12
    return make_limits(
        num_pages=pages,
        # two for each row, what a chunk takes beyond its own row's two, and the padding page
        window_pages=2 * rows + (chunk // 128 - 1) + 1,
        chunk_tokens=chunk,
        max_running=rows,
        max_model_len=max_model_len,
        every=every,
        admission=admission,
        max_waiting_requests=20,
    )


def random_run(
    seed: int, make: type[Watched] = Watched, admission: Admission = "reserve"
) -> RandomRun:
    limits = tight_limits(seed, admission)
    run = RandomRun(limits, seed)
    scheduler = run.bench.scheduler = make(limits)
    scheduler.on_retract = run.retracted.append
    for _ in range(OPERATIONS):
        run.operate()
    run.drain()
    return run


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
@pytest.mark.parametrize("seed", range(len(RUNS)))
def test_p05_p06_s14_random_operations(seed: int, admission: Admission) -> None:
    run = random_run(seed, admission=admission)
    assert run.retracted == run.model.retracted
    assert bool(run.retracted) == (admission == "optimistic")
    assert min(run.seen.values()) > 0, run.seen
    stats = run.bench.scheduler.stats()
    assert stats["aborted"] == run.seen["abort"]
    assert stats["retractions"] == len(run.retracted)
    assert stats["prefill_steps"] == run.seen["prefill"]
    assert stats["decode_steps"] == run.seen["decode"]


class LetsTheShortestPass(Watched):
    def plan(self, now: float) -> StepPlan | None:
        queue = self._prefill._queue
        if queue:
            shortest = min(queue, key=lambda name: queue[name].num_prompt_tokens)
            queue.move_to_end(shortest, last=False)
        return super().plan(now)


class TrimsTooEarly(Watched):
    """Gives window pages back while 128 later positions still see them."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        trim = self._kv.trim
        self._kv.trim = lambda seq_id, end: trim(seq_id, end + 128)  # type: ignore[method-assign]


class NeverTrims(Watched):
    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self._kv.trim = lambda seq_id, end: None  # type: ignore[method-assign]


class PromisesTheirPromptOnly(Watched):
    """Admission counts the prompt's pages and not the output's."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        can_admit = self._kv.can_admit
        self._kv.can_admit = (  # type: ignore[method-assign]
            lambda num_tokens, prompt, **spare: can_admit(max(1, num_tokens - 60), prompt, **spare)
        )


class KeepsPagesOfTheCancelled(Watched):
    def cancel(self, request_id: str) -> TokenEvent | None:
        release, self._kv.release = self._kv.release, lambda seq_id: False  # type: ignore[method-assign]
        try:
            return super().cancel(request_id)
        finally:
            self._kv.release = release  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [
        (LetsTheShortestPass, 0),
        (TrimsTooEarly, 0),
        (NeverTrims, 0),
        (PromisesTheirPromptOnly, 6),  # few pages for many rows
        (KeepsPagesOfTheCancelled, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_schedulers_are_seen(mutant: type[Watched], seed: int) -> None:
    with pytest.raises((AssertionError, OutOfPagesError)):
        random_run(seed, mutant)
