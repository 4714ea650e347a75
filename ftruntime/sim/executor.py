"""An executor whose steps only take time."""

from __future__ import annotations

from dataclasses import dataclass

from ftruntime.sim.clock import VirtualClock
from ftruntime.sim.cost import Cost, StepNoise
from ftruntime.types import SeqPlan, SeqResult, StepPlan, StepResult

_TOKEN_ID = 0


@dataclass
class PrefillSpan:
    """Prefill of one prompt: seconds of its first step's start and its last step's end."""

    start_s: float
    end_s: float
    num_chunks: int = 0
    num_slices: int = 0


class SimExecutor:
    """Moves the clock by the cost of each step; every token drawn is the same.

    `prefills` holds the span of each prompt that has begun, by request id.
    """

    def __init__(
        self, clock: VirtualClock, cost: Cost, num_layers: int, noise: StepNoise | None = None
    ) -> None:
        """
        Args:
            noise: on every step from time 0 on; what came before it is exact.
        """
        self._clock = clock
        self._cost = cost
        self._num_layers = num_layers
        self._noise = noise
        self.prefills: dict[str, PrefillSpan] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        start_s = self._clock.now()
        seconds = self._cost.step_s(plan, self._num_layers)
        if self._noise is not None and start_s >= 0:
            seconds *= self._noise.factor()
        self._clock.advance(seconds)
        if plan.kind == "prefill":
            for seq in plan.seqs:
                self._note(seq, start_s, starts_chunk=plan.layers[0] == 0)
        if plan.layers[1] < self._num_layers:
            return StepResult(plan.index, ())
        return StepResult(plan.index, tuple(_result(seq) for seq in plan.seqs))

    def _note(self, seq: SeqPlan, start_s: float, *, starts_chunk: bool) -> None:
        span = self.prefills.setdefault(seq.request_id, PrefillSpan(start_s, start_s))
        span.end_s = self._clock.now()
        span.num_chunks += starts_chunk
        span.num_slices += 1


def _result(seq: SeqPlan) -> SeqResult:
    return SeqResult(seq.row, seq.request_id, None if seq.sample is None else _TOKEN_ID)
