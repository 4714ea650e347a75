"""An engine without a model: the real scheduler over an executor whose tokens follow a formula.

Prompts hold ordinary ids below `VOCAB`; the three ids from there on make a step fail, sleep or kill
the process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

from ftruntime.engine.loop import EngineLoop, MonotonicClock
from ftruntime.kvcache.layout import chunk_budget
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.types import (
    SchedulerLimits,
    SeqPlan,
    SeqResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

VOCAB = 500
FAIL, SLEEP, KILL = VOCAB, VOCAB + 1, VOCAB + 2


def next_token(last: int, position: int) -> int:
    """The token at `position`, behind `last`."""
    return (last * 31 + position * 7 + 1) % VOCAB


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids[-1], len(ids)))
    return ids[len(prompt) :]


class FakeExecutor:
    """Takes `step_s` for each step, on the sleeping function it is given."""

    def __init__(self, *, step_s: float = 0.0, sleep: Callable[[float], None] = time.sleep) -> None:
        self._step_s = step_s
        self._sleep = sleep
        self.closed = 0
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self._step_s:
            self._sleep(self._step_s)
        ids = {token for seq in plan.seqs for token in seq.token_ids}
        if FAIL in ids:
            raise ArithmeticError("the accelerator is on fire")
        if SLEEP in ids:
            time.sleep(60.0)
        if KILL in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return StepResult(plan.index, tuple(_result(seq) for seq in plan.seqs))

    def close(self) -> None:
        self.closed += 1


def _result(seq: SeqPlan) -> SeqResult:
    targets = seq.prompt_targets or ()
    prompt_logprobs = tuple(TokenLogprobs(t, -0.5, ((t, -0.5),)) for t in targets)
    if seq.sample is None:
        return SeqResult(seq.row, seq.request_id, prompt_logprobs=prompt_logprobs)
    token = next_token(seq.token_ids[-1], seq.start + len(seq.token_ids))
    logprobs = None
    if seq.sample.num_logprobs is not None:
        other = (token + 1) % VOCAB
        logprobs = TokenLogprobs(token, -1.0, ((other, -0.25),)[: seq.sample.num_logprobs])
    return SeqResult(seq.row, seq.request_id, token, logprobs, prompt_logprobs)


def make_limits(config: Mapping[str, object]) -> tuple[SchedulerLimits, dict[str, object]]:
    num_tokens, max_running = int(config.get("num_tokens", 8192)), int(config.get("running", 8))
    budget = chunk_budget(
        max_prefill_length=int(config.get("chunk", 128)), num_tokens=num_tokens,
        max_model_len=num_tokens, max_running=max_running, swa_ratio=1.0, radix=False,
    )  # fmt: skip
    limits = SchedulerLimits(
        num_pages=num_tokens // 128, window_pages=budget.window_pages,
        chunk_tokens=budget.chunk_tokens, max_running=max_running, max_model_len=num_tokens,
        num_layers=4, eos_token_ids=tuple(config.get("eos", ())),
        decode_interleave_every=config.get("interleave"),
        max_waiting_requests=int(config.get("max_waiting", 256)),
    )  # fmt: skip
    info: dict[str, object] = {
        "max_model_len": num_tokens, "vocab_size": VOCAB + 3, "num_tokens": num_tokens,
        "chunk_tokens": budget.chunk_tokens, "window_pages": budget.window_pages,
        "reserved_window_pages": budget.reserved_window_pages, "limiting": budget.limiting,
    }  # fmt: skip
    return limits, info


def build(
    config: Mapping[str, object],
    progress: Callable[[str, float], None],
    on_end: Callable[[str], None],
) -> EngineLoop:
    """The builder that tests name; `config` is a plain dict with the keys read here."""
    if "trace" in config:
        with open(str(config["trace"]), "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS')}")
    progress("weights", 0.5)
    time.sleep(float(config.get("load_s", 0.0)))
    if "error" in config:
        raise ValueError(config["error"])
    limits, info = make_limits(config)
    executor = FakeExecutor(step_s=float(config.get("step_s", 0.0)))
    return EngineLoop(
        Scheduler(limits), executor, MonotonicClock(), info=info, decode_log_interval=40,
        extra_stats=lambda: {"experts": {"num_slots": 3}},
    )  # fmt: skip
