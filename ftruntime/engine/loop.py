"""The step loop: plan, execute, commit; one instance behind the HTTP server and inside `LLM`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from ftruntime.engine.steplog import StepLog
from ftruntime.types import (
    Clock,
    EngineFailedError,
    Executor,
    Request,
    StepPlan,
    StepResult,
    TokenEvent,
)

CHUNK_KEYS = ("chunk_tokens", "window_pages", "reserved_window_pages", "limiting")

_logger = logging.getLogger(__name__)


class MonotonicClock:
    """Seconds of the machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class SchedulerLike(Protocol):
    """What the loop needs of `ftruntime.scheduler.Scheduler`."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> TokenEvent | None: ...
    def plan(self, now: float) -> StepPlan | None: ...
    def commit(
        self, plan: StepPlan, result: StepResult, now: float | None = None
    ) -> list[TokenEvent]: ...
    def fail(self, plan: StepPlan, message: str, now: float | None = None) -> list[TokenEvent]: ...
    def stats(self) -> Mapping[str, object]: ...
    def check(self) -> None: ...


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


@runtime_checkable
class _Checkable(Protocol):
    def check(self) -> None: ...


@runtime_checkable
class _KeepsAlive(Protocol):
    def keep_alive(self) -> None: ...


class EngineLoop:
    """Scheduler and executor, driven one step at a time.

    `submit`, `cancel`, `step`, `idle`, `keep_alive` and `close` belong to one thread; `stats` and
    `steps` may be called from another one, also while a step runs. `info` describes the engine to
    its front: at least `max_model_len`, `vocab_size`, `num_tokens` and the `CHUNK_KEYS`.
    `extra_stats` is merged into `stats` and must be safe to call while a step runs.
    """

    def __init__(
        self,
        scheduler: SchedulerLike,
        executor: Executor,
        clock: Clock,
        *,
        info: Mapping[str, object],
        decode_log_interval: int,
        extra_stats: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        if decode_log_interval < 1:
            raise ValueError(
                f"decode_log_interval is {decode_log_interval}, expected an integer >= 1"
            )
        self.clock = clock
        self.eos_token_ids = scheduler.eos_token_ids
        self.info = {**info, "eos_token_ids": list(self.eos_token_ids)}
        self._scheduler = scheduler
        self._executor = executor
        self._extra_stats = extra_stats
        now = clock.now()
        self._log = StepLog(origin_s=now, decode_log_interval=decode_log_interval)
        # guards scheduler and log; free while the executor runs, so that a stuck step can be seen
        self._lock = threading.Lock()
        self._step_start_s: float | None = None
        self._progress_s = now  # end of the last step, or when work came to an idle loop
        self._step_end_s = now
        self._num_aborted = 0
        self._unchecked = False
        self._integrity = "ok"
        self._closed = False

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_steps(self) -> int:
        """Steps executed so far, failed ones included."""
        return self._log.num_steps

    @property
    def executing(self) -> bool:
        """True while the executor runs, when neither scheduler nor records are being changed."""
        return self._step_start_s is not None

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRejectedError: it can never run, or the queue is full.
        """
        with self._lock:
            if not self._scheduler.has_work:
                self._progress_s = self.clock.now()
            self._scheduler.submit(request)
            self._unchecked = True

    def cancel(self, request_id: str, *, aborted: bool = True) -> TokenEvent | None:
        """End a request and free what it holds; None when it is unknown or already over.

        `aborted=False`: its reader had all it wanted, so it does not count as aborted.
        """
        with self._lock:
            event = self._scheduler.cancel(request_id)
            if event is not None:
                self._num_aborted += aborted
                self._log.ended(request_id)
                self._unchecked = True
        return event

    def step(self) -> list[TokenEvent]:
        """Run the scheduler's next step, if it has one, and say what it did for each request.

        An exception of the executor, or a result that is not the plan's, fails the requests of the
        step; the others go on. KeyboardInterrupt fails them too and is raised again, with nothing
        left in flight.
        """
        with self._lock:
            plan = self._scheduler.plan(self.clock.now())
        if plan is None:
            return []
        start_s = self.clock.now()
        try:
            try:
                self._step_start_s = start_s
                result = self._executor.execute(plan)
            finally:
                self._step_start_s = None
            return self._finish(
                plan, start_s, lambda now: self._scheduler.commit(plan, result, now)
            )
        except EngineFailedError:
            raise
        except Exception as error:
            message = f"the step that ran this request failed with {type(error).__name__}: {error}"
            _logger.exception("step failed index=%d error=%s", plan.index, type(error).__name__)
            with self._lock:
                self._log.dump(plan)
        except KeyboardInterrupt:
            self._step_start_s = None
            self._finish(
                plan, start_s,
                lambda now: self._scheduler.fail(plan, "the step was interrupted", now),
            )  # fmt: skip
            raise
        return self._finish(plan, start_s, lambda now: self._scheduler.fail(plan, message, now))

    def _finish(
        self, plan: StepPlan, start_s: float, settle: Callable[[float], list[TokenEvent]]
    ) -> list[TokenEvent]:
        with self._lock:
            end_s = self.clock.now()
            events = settle(end_s)
            counts = f"running={self._scheduler.num_running} waiting={self._scheduler.num_waiting}"
            self._log.add(plan, events, start_s, end_s, counts)
            self._progress_s = self._step_end_s = end_s
            self._unchecked = True
        return events

    def idle(self) -> None:
        """Call when no work is left: ends the burst's account, checks that every page came home."""
        if not self._unchecked or self._scheduler.has_work:
            return
        with self._lock:
            self._unchecked = False
            self._log.close_burst(self.clock.now())
            try:
                self._scheduler.check()
                if isinstance(self._executor, _Checkable):
                    self._executor.check()
            # any broken invariant must be reported, none may end the engine
            except Exception as error:
                self._integrity = f"{type(error).__name__}: {error}"
                _logger.error("integrity check failed error=%s", self._integrity)

    def keep_alive(self) -> None:
        """Call now and then while no work is left: others whom the executor needs may be gone.

        Raises:
            EngineFailedError: they are.
        """
        if isinstance(self._executor, _KeepsAlive):
            self._executor.keep_alive()

    def stats(self) -> dict[str, object]:
        """The dict of `/v1/stats`, with the ages of the present and the last step in seconds."""
        with self._lock:
            log, start_s, now = self._log, self._step_start_s, self.clock.now()
            stats: dict[str, object] = {
                key: self.info[key] for key in CHUNK_KEYS if key in self.info
            }
            stats |= self._scheduler.stats()
            waits = start_s is None and self._scheduler.has_work
            stats |= {
                "aborted": self._num_aborted,
                "largest_gap_ms": round(log.largest_gap_s * 1e3, 3),
                "running_step_s": 0.0 if start_s is None else max(0.0, now - start_s),
                "last_step_age_s": max(0.0, now - self._step_end_s),
                "waiting_without_step_s": max(0.0, now - self._progress_s) if waits else 0.0,
                "integrity": self._integrity,
            }
        return {**stats, **self._extra_stats()}

    def steps(self, since: int) -> dict[str, object]:
        """The last 4096 step records with index >= `since`: `{"steps": [...], "next": M}`."""
        with self._lock:
            return self._log.since(since)

    def close(self) -> None:
        """Close the executor, if it can be closed; the loop runs no further step."""
        if self._closed:
            return
        self._closed = True
        if isinstance(self._executor, _Closable):
            self._executor.close()
