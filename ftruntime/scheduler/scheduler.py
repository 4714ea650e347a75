"""Facade of the scheduler: submit and cancel at any time; plan a step, then commit or fail it.

One plan is under way at a time. All state changes that a step causes happen in `commit`, except
that pages and rows are assigned when a step is planned and given back the moment a request ends,
whatever is under way. Of a chunk that has layer slices to come only the row is: they still write to
the pages, which come back with the last slice, or once all requests of the chunk have ended.
"""

from __future__ import annotations

from ftruntime.kvcache.manager import KVManager
from ftruntime.scheduler.admission import check_limits, check_queue, check_request
from ftruntime.scheduler.chunk import ChunkRun
from ftruntime.scheduler.decode import DecodeManager
from ftruntime.scheduler.pace import Pace
from ftruntime.scheduler.policy import InterleavePolicy
from ftruntime.scheduler.prefill import PrefillManager
from ftruntime.scheduler.pressure import Pressure
from ftruntime.scheduler.sampling import finish_reason
from ftruntime.scheduler.table import NO_ROW, RequestRow, RequestTable
from ftruntime.types import (
    FinishReason,
    Request,
    SchedulerLimits,
    SeqPlan,
    SeqResult,
    StepKind,
    StepPlan,
    StepResult,
    TokenEvent,
)

_NO_FINITE_LOGIT = "the model returned no finite logit for the next token"


class Scheduler:
    """Decides every step; knows tokens and pages, no tensors. Not thread-safe."""

    def __init__(self, limits: SchedulerLimits, *, policy: InterleavePolicy | None = None) -> None:
        """
        Args:
            limits: what the resolved flags allow.
            policy: replaces the one that `limits.decode_interleave_every` asks for.

        Raises:
            ValueError: the limits do not fit together, or the interleave number is invalid.
        """
        check_limits(limits)
        self._limits = limits
        self._policy = policy or InterleavePolicy(limits.decode_interleave_every)
        self._table = RequestTable(limits.max_running)
        self._kv = KVManager(
            limits.num_pages, limits.window_pages, prefix_cache=limits.prefix_cache
        )
        self._prefill = PrefillManager(
            self._table,
            self._kv,
            chunk_tokens=limits.chunk_tokens,
            optimistic=limits.admission == "optimistic",
            eos_token_ids=limits.eos_token_ids,
        )
        self._decode = DecodeManager(self._kv, eos_token_ids=limits.eos_token_ids)
        self._pace = Pace(limits, self._prefill, self._policy)
        self._chunks = ChunkRun(self._kv, limits.num_layers)
        self._pressure = Pressure(self._table, self._kv, self._prefill, self._decode, self._chunks)
        self._under_way: tuple[StepPlan, tuple[RequestRow, ...]] | None = None
        self._next_index = 0
        self._num_steps: dict[StepKind, int] = {"prefill": 0, "decode": 0}
        self._num_interleaved = 0
        self._num_aborted = 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended. `plan` then returns a step."""
        return len(self._table) > 0

    @property
    def num_running(self) -> int:
        """Requests that hold a row: prefilling or decoding."""
        return self._table.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._prefill.num_waiting

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end every request which does not ignore them."""
        return self._limits.eos_token_ids

    @property
    def has_unfinished_prefill(self) -> bool:
        """Whether a chunk or a prompt is partly prefilled, or the head of the queue could be."""
        return self._chunks.current is not None or self._prefill.can_run()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that have not ended, in order of arrival."""
        return tuple(row.request_id for row in self._table)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRejectedError: it can never run (400) or the queue is full (429).
            ValueError: its id is being served, or its parameters are not resolved.
        """
        check_request(request, self._limits)
        check_queue(
            request,
            self._limits,
            num_waiting=self._prefill.num_waiting,
            waiting_tokens=self._prefill.waiting_tokens,
            num_free_rows=self._table.num_free_rows,
        )
        self._prefill.enqueue(self._table.add(request))

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End a request now, wherever it is; None when no such request is being served.

        Its pages are free on return, or with its chunk when other requests go on in that. A step
        that is under way still writes to them, before any step that is planned later; its result is
        ignored by `commit`.
        """
        row = self._table.get(request_id)
        if row is None:
            return None
        self._end(row)
        self._num_aborted += 1
        return TokenEvent(request_id, None, finish_reason="abort")

    def plan(self, now: float) -> StepPlan | None:
        """Choose the next step; None when there is nothing to do.

        Args:
            now: seconds on the engine's monotonic clock, for policies bound by time.

        Raises:
            RuntimeError: the previous plan was neither committed nor failed.
        """
        if self._under_way is not None:
            raise RuntimeError(
                f"step {self._under_way[0].index} is under way, expected commit or fail before plan"
            )
        if self._pace.decode_first(now, self._chunks.current, self._num_decodable()):
            step = self._plan_decode()
            if step is not None:
                return step
        return self._plan_prefill() or self._plan_decode()

    def commit(
        self, plan: StepPlan, result: StepResult, now: float | None = None
    ) -> list[TokenEvent]:
        """Take in what a step produced: advance, finish, give back pages.

        Results of requests that ended meanwhile are ignored. Only the last slice of a chunk has
        results.

        Args:
            now: end of the step on the clock of `plan`; without one a gap bound learns nothing.

        Raises:
            ValueError: the result is not the plan's; nothing has changed, and the plan can still be
                failed.
        """
        rows = self._rows_of(plan)
        if result.index != plan.index:
            raise ValueError(f"result.index is {result.index}, expected {plan.index}")
        results = {seq.row: seq for seq in result.seqs}
        live = [(row, seq) for row, seq in zip(rows, plan.seqs, strict=True) if row.stands_in(seq)]
        if plan.layers[1] < self._limits.num_layers:
            live = []
        for _, seq in live:
            _check_result(seq, results.get(seq.row))
        self._under_way = None
        advanced = [self._advance(row, seq, results[seq.row]) for row, seq in live]
        if now is not None:
            self._pace.ran(plan, now)
            self._pace.ended(plan.kind, now, self._num_decodable())
        return [event for event in advanced if event is not None]

    def fail(self, plan: StepPlan, message: str, now: float | None = None) -> list[TokenEvent]:
        """A step did not happen: its requests end with an error, all others go on."""
        named = zip(self._rows_of(plan), plan.seqs, strict=True)
        rows = [row for row, seq in named if row.stands_in(seq)]
        self._under_way = None
        for row in rows:
            self._end(row)
        self._chunks.drop(plan.drop)  # nobody knows how far the step came
        if plan.kind == "prefill" and plan.layers != (0, self._limits.num_layers):
            self._chunks.drop(tuple(seq.row for seq in plan.seqs))
        if now is not None:
            self._pace.ended(plan.kind, now, self._num_decodable())
        return [
            TokenEvent(row.request_id, None, finish_reason="error", error=message) for row in rows
        ]

    def stats(self) -> dict[str, object]:
        """The scheduler's numbers of `/v1/stats`; pages count those that hold rows."""
        return {
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "used_pages": self._kv.used_pages,
            "cached_pages": self._kv.cached_pages,
            "total_pages": self._kv.total_pages,
            "used_window_pages": self._kv.used_window_pages,
            "total_window_pages": self._kv.total_window_pages,
            "interleaved_decode_steps": self._num_interleaved,
            "prefill_streak": self._policy.streak,
            "prefill_steps": self._num_steps["prefill"],
            "decode_steps": self._num_steps["decode"],
            "retractions": self._pressure.num_retractions,
            "aborted": self._num_aborted,
        }

    def check(self) -> None:
        """Pages and rows are all accounted for, and exactly the rows' requests hold pages.

        Raises:
            AssertionError: something leaked or is held twice.
        """
        self._kv.check()
        self._table.check()
        seated = {row.request_id for row in self._table if row.row != NO_ROW}
        if self._chunks.current is not None:
            seated |= {row.request_id for row in self._chunks.current.left}
        if set(self._kv.sequence_ids) != seated:
            raise AssertionError(
                f"{sorted(self._kv.sequence_ids)} hold pages, {sorted(seated)} hold rows"
            )
        if len(self._table) != self.num_running + self.num_waiting:
            raise AssertionError(
                f"{len(self._table)} requests are known, {self.num_running} hold a row and "
                f"{self.num_waiting} wait"
            )

    def _num_decodable(self) -> int:
        return len(self._decode.rows) if self._pace.timed else 0

    def _plan_prefill(self) -> StepPlan | None:
        chunk, num_rows = self._chunks.current, self._num_decodable()
        if chunk is None:
            batch = self._prefill.build(self._pace.new_chunk_tokens(num_rows))
            if not batch:
                return None
            chunk = self._chunks.begin(batch, self._pace.bounds)
        layers = self._chunks.take(chunk, self._pace.slice_layers(chunk, num_rows))
        return self._step("prefill", chunk.batch, layers=layers)

    def _plan_decode(self) -> StepPlan | None:
        if not self._decode.can_run:
            return None
        if self._limits.admission == "optimistic":
            self._pressure.make_room()
        batch = self._decode.build()
        self._policy.decode_planned()
        if not batch:
            return None
        interleaved = self.has_unfinished_prefill
        self._num_interleaved += interleaved
        return self._step("decode", batch, interleaved=interleaved)

    def _step(
        self,
        kind: StepKind,
        batch: list[tuple[RequestRow, SeqPlan]],
        *,
        layers: tuple[int, int] | None = None,
        interleaved: bool = False,
    ) -> StepPlan:
        plan = StepPlan(
            index=self._next_index,
            kind=kind,
            seqs=tuple(seq for _, seq in batch),
            layers=layers or (0, self._limits.num_layers),
            interleaved=interleaved,
            drop=self._chunks.take_drop(),
        )
        self._next_index += 1
        self._num_steps[kind] += 1
        self._under_way = plan, tuple(row for row, _ in batch)
        self._pace.planned(plan)
        return plan

    def _rows_of(self, plan: StepPlan) -> tuple[RequestRow, ...]:
        if self._under_way is None or self._under_way[0] is not plan:
            raise ValueError(f"step {plan.index} is not under way, expected the newest plan")
        return self._under_way[1]

    def _advance(self, row: RequestRow, seq: SeqPlan, result: SeqResult) -> TokenEvent | None:
        end = seq.start + len(seq.token_ids)
        row.num_computed = end
        self._kv.keep(
            row.request_id, row.token_ids, end,
            prompt_ends=row.status == "prefilling" and seq.sample is not None,
        )  # fmt: skip
        row.prompt_logprobs.extend(result.prompt_logprobs)
        if seq.sample is None:
            self._kv.trim(row.request_id, end)
            return None
        assert result.token_id is not None  # checked by commit
        if result.token_id < 0:
            self._end(row)
            return TokenEvent(row.request_id, None, finish_reason="error", error=_NO_FINITE_LOGIT)
        row.append(result.token_id)
        reason = finish_reason(
            row,
            eos_token_ids=self._limits.eos_token_ids,
            max_model_len=self._limits.max_model_len,
        )
        self._settle(row, end, reason)
        first = row.num_generated == 1 and row.params.prompt_logprobs is not None
        return TokenEvent(
            row.request_id,
            result.token_id,
            finish_reason=reason,
            logprobs=result.logprobs,
            prompt_logprobs=tuple(row.prompt_logprobs) if first else None,
            num_cached_tokens=row.num_cached,
        )

    def _settle(self, row: RequestRow, end: int, reason: FinishReason | None) -> None:
        if reason is not None:
            self._end(row)
            return
        self._kv.trim(row.request_id, end)
        if row.status == "prefilling":
            self._decode.join(row)

    def _end(self, row: RequestRow) -> None:
        self._prefill.discard(row)
        self._table.end(row)
        if row.row != NO_ROW:
            self._chunks.give_back(row)


def _check_result(seq: SeqPlan, result: SeqResult | None) -> None:
    if result is None or result.request_id != seq.request_id:
        raise ValueError(f"result has nothing for row {seq.row}, expected {seq.request_id!r}")
    if (result.token_id is None) != (seq.sample is None):
        raise ValueError(
            f"token_id of {seq.request_id!r} is {result.token_id}, expected "
            + ("a token id" if seq.sample is not None else "None: nothing was to be drawn")
        )
    num_targets = len(seq.prompt_targets or ())
    if len(result.prompt_logprobs) != num_targets:
        raise ValueError(
            f"prompt_logprobs of {seq.request_id!r} has {len(result.prompt_logprobs)} entries, "
            f"expected {num_targets}"
        )
