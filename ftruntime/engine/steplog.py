"""What the loop remembers of its steps: records, decode gaps, prefill bursts, log lines."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ftruntime.types import StepPlan, TokenEvent

RING_STEPS = 4096
HISTORY_STEPS = 16

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """One executed step. `start_s` counts from the creation of the loop."""

    index: int
    kind: str
    num_seqs: int
    num_tokens: int
    layers: tuple[int, int]
    interleaved: bool
    start_s: float
    duration_ms: float

    def as_dict(self) -> dict[str, object]:
        """The record as `/v1/steps` shows it."""
        return {
            "index": self.index,
            "kind": self.kind,
            "num_seqs": self.num_seqs,
            "num_tokens": self.num_tokens,
            "layers": list(self.layers),
            "interleaved": self.interleaved,
            "start_s": round(self.start_s, 6),
            "duration_ms": round(self.duration_ms, 3),
        }


@dataclass
class _Burst:
    """Prefill steps from the first one to the next decode that no prefill waits behind."""

    start_s: float
    prefill_steps: int = 0
    prefill_tokens: int = 0
    interleaved: int = 0
    largest_gap_s: float = 0.0


@dataclass
class _Interval:
    """Decode steps since the last decode line."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    largest_gap_s: float = 0.0


@dataclass
class StepLog:
    """Records of the last steps, and the gaps between decode steps.

    A gap runs from the end of one decode step to the end of the next, while a request that can
    decode exists; a request can decode from its first token on. Times are seconds on the loop's
    clock, `origin_s` being its creation.
    """

    origin_s: float
    decode_log_interval: int
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RING_STEPS))
    num_steps: int = 0
    next_index: int = 0
    largest_gap_s: float = 0.0
    _decodable: set[str] = field(default_factory=set)
    _gap_start_s: float | None = None
    _burst: _Burst | None = None
    _interval: _Interval = field(default_factory=_Interval)

    def since(self, since: int) -> dict[str, object]:
        """The remembered records with index >= `since`, and the index after the newest."""
        steps = [record.as_dict() for record in self.records if record.index >= since]
        return {"steps": steps, "next": self.next_index}

    def add(
        self,
        plan: StepPlan,
        events: Sequence[TokenEvent],
        start_s: float,
        end_s: float,
        counts: str,
    ) -> None:
        """Take note of an executed step; `counts` is the line's word on running and waiting."""
        record = StepRecord(
            index=plan.index, kind=plan.kind, num_seqs=len(plan.seqs), num_tokens=plan.num_tokens,
            layers=plan.layers, interleaved=plan.interleaved,
            start_s=start_s - self.origin_s, duration_ms=(end_s - start_s) * 1e3,
        )  # fmt: skip
        self.records.append(record)
        self.num_steps += 1
        self.next_index = plan.index + 1
        if plan.kind == "prefill":
            self._prefill(record, start_s, counts)
        else:
            # a decode has every row that can decode: who is missing gave its pages up
            self._decodable &= {seq.request_id for seq in plan.seqs}
            self._decode(record, end_s, counts)
        self._follow(events, end_s)

    def ended(self, request_id: str) -> None:
        """A request was cancelled between two steps."""
        self._decodable.discard(request_id)
        if not self._decodable:
            self._gap_start_s = None

    def close_burst(self, now_s: float) -> None:
        """Say what the prefill burst did, if one is open."""
        burst, self._burst = self._burst, None
        if burst is not None:
            _logger.info(
                "prefill burst done prefill_steps=%d interleaved_decode_steps=%d prefill_tokens=%d "
                "largest_gap_ms=%.1f duration_s=%.3f",
                burst.prefill_steps, burst.interleaved, burst.prefill_tokens,
                burst.largest_gap_s * 1e3, now_s - burst.start_s,
            )  # fmt: skip

    def dump(self, plan: StepPlan) -> None:
        """Log the step that failed and the last steps before it."""
        _logger.error(
            "failed step index=%d kind=%s tokens=%d layers=%d-%d interleaved=%s requests=%s",
            plan.index, plan.kind, plan.num_tokens, *plan.layers, plan.interleaved,
            ",".join(seq.request_id for seq in plan.seqs),
        )  # fmt: skip
        for record in list(self.records)[-HISTORY_STEPS:]:
            fields = " ".join(f"{name}={value}" for name, value in record.as_dict().items())
            _logger.error("step history %s", fields)

    def _prefill(self, record: StepRecord, start_s: float, counts: str) -> None:
        if self._burst is None:
            self._burst = _Burst(start_s=start_s)
        self._burst.prefill_steps += 1
        self._burst.prefill_tokens += record.num_tokens if record.layers[0] == 0 else 0
        _logger.info(
            "prefill step index=%d seqs=%d tokens=%d layers=%d-%d duration_ms=%.1f %s",
            record.index, record.num_seqs, record.num_tokens, *record.layers,
            record.duration_ms, counts,
        )  # fmt: skip

    def _decode(self, record: StepRecord, end_s: float, counts: str) -> None:
        gap_s = 0.0 if self._gap_start_s is None else end_s - self._gap_start_s
        self._gap_start_s = end_s
        self.largest_gap_s = max(self.largest_gap_s, gap_s)
        if self._burst is not None:
            self._burst.interleaved += record.interleaved
            self._burst.largest_gap_s = max(self._burst.largest_gap_s, gap_s)
            if not record.interleaved:
                self.close_burst(end_s)
        self._log_decode(record, gap_s, counts)

    def _log_decode(self, record: StepRecord, gap_s: float, counts: str) -> None:
        interval = self._interval
        interval.steps += 1
        interval.tokens += record.num_tokens
        interval.busy_s += record.duration_ms / 1e3
        interval.largest_gap_s = max(interval.largest_gap_s, gap_s)
        if interval.steps < self.decode_log_interval:
            return
        _logger.info(
            "decode steps=%d index=%d seqs=%d tokens_per_s=%.1f step_ms=%.2f "
            "largest_gap_ms=%.1f %s",
            interval.steps, record.index, record.num_seqs,
            interval.tokens / interval.busy_s if interval.busy_s > 0 else 0.0,
            interval.busy_s / interval.steps * 1e3, interval.largest_gap_s * 1e3, counts,
        )  # fmt: skip
        self._interval = _Interval()

    def _follow(self, events: Sequence[TokenEvent], end_s: float) -> None:
        for event in events:
            if event.finish_reason is not None:
                self._decodable.discard(event.request_id)
            elif event.token_id is not None:
                self._decodable.add(event.request_id)
        if not self._decodable:
            self._gap_start_s = None
        elif self._gap_start_s is None:
            self._gap_start_s = end_s
