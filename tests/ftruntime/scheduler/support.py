"""A scheduler under test: short makers, and an executor that believes nothing it is told.

The executor keeps its own tables and writes owners into its own pools, so a page that is missing,
given away too early or shared shows up as a wrong owner at the step that would read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.scheduler.table import RequestRow
from ftruntime.types import (
    Admission,
    Request,
    SamplingParams,
    SchedulerLimits,
    SeqPlan,
    SeqResult,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)

EOS = 1


def make_limits(
    *,
    num_pages: int = 64,
    window_pages: int = 64,
    chunk_tokens: int = 128,
    max_running: int = 4,
    max_model_len: int = 1 << 20,
    every: int | None = None,
    gap_s: float | None = None,
    groups: int | None = None,
    admission: Admission = "reserve",
    max_waiting_requests: int = 256,
    max_waiting_tokens: int = 1 << 40,
) -> SchedulerLimits:
    return SchedulerLimits(
        num_pages=num_pages,
        window_pages=window_pages,
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        max_model_len=max_model_len,
        num_layers=3,
        decode_interleave_every=every,
        max_decode_gap_s=gap_s,
        prefill_layer_groups=groups,
        admission=admission,
        max_waiting_requests=max_waiting_requests,
        max_waiting_tokens=max_waiting_tokens,
        eos_token_ids=(EOS,),
    )


def make_request(
    request_id: str, num_prompt: int, max_tokens: int = 16, **params: object
) -> Request:
    prompt = tuple(10 + (sum(map(ord, request_id)) + i) % 200 for i in range(num_prompt))
    sampling = SamplingParams(max_tokens=max_tokens, seed=7, **params)  # type: ignore[arg-type]
    return Request(request_id, prompt, sampling, arrival_s=0.0)


@dataclass
class CheckingExecutor:
    """Executes plans against its own pools; `choose(request_id, position)` draws the token.

    Every layer slice of a chunk writes all pages of the chunk once more.
    """

    limits: SchedulerLimits
    choose: Callable[[str, int], int] = lambda request_id, position: 100 + position % 50
    requests: dict[str, Request] = field(default_factory=dict)
    holder: dict[int, int] = field(default_factory=dict)  # row -> life, one number per fresh plan
    done: dict[int, list[int]] = field(default_factory=dict)  # life -> tokens that went in
    drawn: dict[int, list[int]] = field(default_factory=dict)  # one list for all of a request's
    of_request: dict[int, list[int]] = field(default_factory=dict)  # by identity
    tables: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # life -> pages
    window_owner: dict[int, tuple[int, int]] = field(default_factory=dict)  # page -> life, logical
    row_owner: dict[int, tuple[int, int]] = field(default_factory=dict)
    # the chunk between two slices by its rows: its plan, and the layers that are done
    kept: dict[tuple[int, ...], tuple[tuple[SeqPlan, ...], int]] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.seqs, "an empty step"
        for rows in [rows for rows in self.kept if set(rows) & set(plan.drop)]:
            del self.kept[rows]
        first, last = plan.layers
        assert 0 <= first < last <= self.limits.num_layers
        rows = tuple(seq.row for seq in plan.seqs)
        assert len({seq.row for seq in plan.seqs}) == len(plan.seqs) <= self.limits.max_running
        if plan.kind == "prefill":
            assert plan.num_tokens <= self.limits.chunk_tokens
            assert not plan.interleaved
        else:
            assert all(len(seq.token_ids) == 1 for seq in plan.seqs)
            assert plan.layers == (0, self.limits.num_layers)
        if first > 0:
            assert self.kept.pop(rows) == (plan.seqs, first), "the slice follows the last one"
        elif plan.kind == "prefill":
            assert not self.kept, "one chunk at a time"
        for seq in plan.seqs:
            if first == 0:
                self._enter(seq)
            self._write(seq)
        for seq in plan.seqs:  # after all writes of the step
            self._check_visible(seq)
        if last < self.limits.num_layers:
            self.kept[rows] = plan.seqs, last
            return StepResult(plan.index, ())
        return StepResult(plan.index, tuple(self._result(plan, seq) for seq in plan.seqs))

    def _enter(self, seq: SeqPlan) -> None:
        assert 0 <= seq.row < self.limits.max_running
        if seq.fresh:
            self._begin(seq)
        life = self.holder[seq.row]
        table = self.tables[life]
        for logical, window_page, row_page in seq.new_pages:
            assert logical == len(table), "pages are assigned in order, each once"
            assert 1 <= window_page < self.limits.window_pages
            assert 1 <= row_page <= self.limits.num_pages
            table[logical] = (window_page, row_page)
        tokens = self.done[life]
        assert seq.start == len(tokens), "a token is computed once, in order"
        tokens.extend(seq.token_ids)
        prompt = self.requests[seq.request_id].prompt_token_ids
        assert tokens == [*prompt, *self.drawn[life]][: len(tokens)]

    def _begin(self, seq: SeqPlan) -> None:
        """A row's life; a request that comes back to a row goes on with what it has drawn."""
        life, request = len(self.done), self.requests[seq.request_id]
        self.holder[seq.row] = life
        self.drawn[life] = self.of_request.setdefault(id(request), [])
        known = [*request.prompt_token_ids, *self.drawn[life]]
        self.done[life], self.tables[life] = known[: seq.start], {}

    def _write(self, seq: SeqPlan) -> None:
        life = self.holder[seq.row]
        table, tokens = self.tables[life], self.done[life]
        for logical in range(seq.start // 128, (len(tokens) - 1) // 128 + 1):
            window_page, row_page = table[logical]
            if logical * 128 < seq.start:  # tokens stand there already
                owners = self.window_owner[window_page], self.row_owner[row_page]
                assert owners == ((life, logical), (life, logical))
            self.window_owner[window_page] = (life, logical)
            self.row_owner[row_page] = (life, logical)

    def _check_visible(self, seq: SeqPlan) -> None:
        life = self.holder[seq.row]
        table, last = self.tables[life], seq.start + len(seq.token_ids) - 1
        for logical in range(max(0, seq.start - 127) // 128, last // 128 + 1):
            assert self.window_owner[table[logical][0]] == (life, logical)
        for logical in range(last // 128 + 1):
            assert self.row_owner[table[logical][1]] == (life, logical)

    def _result(self, plan: StepPlan, seq: SeqPlan) -> SeqResult:
        life, request = self.holder[seq.row], self.requests[seq.request_id]
        end = seq.start + len(seq.token_ids)
        known = len(request.prompt_token_ids) + len(self.drawn[life])
        if plan.kind == "prefill":
            assert seq.start % 128 == 0
            assert end == known or end % 128 == 0, "a part ends on a page edge"
            assert end <= known
            assert (seq.sample is not None) == (end == known)
        scores = tuple(TokenLogprobs(token, -1.0) for token in seq.prompt_targets or ())
        if seq.sample is None:
            return SeqResult(seq.row, seq.request_id, prompt_logprobs=scores)
        assert seq.sample.position == end
        token = self.choose(seq.request_id, end)
        self.drawn[life].append(token)
        return SeqResult(seq.row, seq.request_id, token_id=token, prompt_logprobs=scores)


class Watched(Scheduler):
    """Tells `on_retract` who gives pages up."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.on_retract: Callable[[str], None] = lambda request_id: None
        retract = self._pressure.retract

        def watched(row: RequestRow) -> None:
            self.on_retract(row.request_id)
            retract(row)

        self._pressure.retract = watched  # type: ignore[method-assign]


class Bench:
    """Scheduler and executor together; `trace` holds one letter a step."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        scheduler: Scheduler | None = None,
        choose: Callable[[str, int], int] | None = None,
    ) -> None:
        self.limits = limits
        self.scheduler = scheduler or Scheduler(limits)
        self.executor = CheckingExecutor(limits)
        if choose is not None:
            self.executor.choose = choose
        self.plans: list[StepPlan] = []
        self.events: dict[str, list[TokenEvent]] = {}
        self.now: float | None = None  # a clock of its own where a test moves one

    @property
    def trace(self) -> str:
        return "".join(plan.kind[0] for plan in self.plans)

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.executor.requests[request.request_id] = request

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now or 0.0)
        if plan is not None:
            self.plans.append(plan)
        return plan

    def step(self) -> list[TokenEvent]:
        plan = self.plan()
        assert plan is not None, "nothing to do"
        return self.finish(plan)

    def finish(self, plan: StepPlan) -> list[TokenEvent]:
        return self.keep(self.scheduler.commit(plan, self.executor.execute(plan), self.now))

    def steps(self, count: int) -> str:
        """Run steps; returns their letters."""
        for _ in range(count):
            self.step()
        return self.trace[-count:]

    def drain(self, limit: int = 10_000) -> None:
        while self.scheduler.has_work:
            limit -= 1
            assert limit, "requests do not end"
            self.step()
        self.check_empty()

    def keep(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)
        return events

    def tokens(self, request_id: str) -> list[int | None]:
        return [event.token_id for event in self.events[request_id]]

    def reason(self, request_id: str) -> str | None:
        return self.events[request_id][-1].finish_reason

    def check_empty(self) -> None:
        self.scheduler.check()
        stats = self.scheduler.stats()
        names = ("num_running", "num_waiting", "used_pages", "used_window_pages")
        assert [stats[name] for name in names] == [0, 0, 0, 0]
        assert self.scheduler.plan(0.0) is None
