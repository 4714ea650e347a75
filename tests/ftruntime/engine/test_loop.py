"""The step loop over the real scheduler, on a clock that only the executor moves.

Mutants that these tests catch: gap start kept over a decode, over a moment without a decodable
request, or over a cancel; interleaved steps not counted in the burst; burst ended by any decode, or
not ended at idle; ring without a bound; `since` exclusive; absolute `start_s`; late decode line;
short history; `fail` not called; failed check not reported; a finished request counted as aborted;
a running step that never ends; idle time counted as waiting.
"""

from __future__ import annotations

import logging
import threading

import pytest

from ftruntime.engine.loop import EngineLoop
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.types import Request, RequestRejectedError, SamplingParams, StepPlan, StepResult
from tests.ftruntime.engine.fake_engine import FAIL, FakeExecutor, expected_tokens, make_limits

PREFILL_S, DECODE_S = 1.0, 0.01


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class TimedExecutor(FakeExecutor):
    """A prefill step takes 1 s, a decode step 10 ms."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock.time += PREFILL_S if plan.kind == "prefill" else DECODE_S
        return super().execute(plan)


def make_loop(log_every: int = 40, **config: object) -> tuple[EngineLoop, ManualClock]:
    limits, info = make_limits(config)
    clock = ManualClock()
    loop = EngineLoop(
        Scheduler(limits), TimedExecutor(clock), clock, info=info, decode_log_interval=log_every
    )
    return loop, clock


def submit(loop: EngineLoop, name: str, num_prompt: int, max_tokens: int) -> list[int]:
    prompt = [(7 * i + len(name)) % 500 for i in range(num_prompt)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
    loop.submit(Request(name, tuple(prompt), params, loop.clock.now()))
    return prompt


def run(loop: EngineLoop) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while loop.has_work:
        for event in loop.step():
            if event.token_id is not None:
                tokens.setdefault(event.request_id, []).append(event.token_id)
    loop.idle()
    return tokens


def burst(loop: EngineLoop, chunks: int = 10) -> None:
    """A victim that decodes, then a prompt of `chunks` chunks."""
    submit(loop, "victim", 5, 60)
    for _ in range(4):
        loop.step()
    submit(loop, "long", 128 * chunks, 1)
    run(loop)


def test_tokens_follow_the_formula_alone_and_together() -> None:
    loop, _ = make_loop()
    prompts = {name: submit(loop, name, n, 9) for name, n in (("a", 5), ("bb", 300), ("ccc", 128))}
    tokens = run(loop)
    assert tokens == {name: expected_tokens(prompt, 9) for name, prompt in prompts.items()}
    assert loop.stats()["used_pages"] == 0


def test_steps_since() -> None:
    loop, _ = make_loop()
    assert loop.steps(0) == {"steps": [], "next": 0}
    submit(loop, "a", 200, 3)  # two chunks, the second draws the first token; two decode steps
    run(loop)
    steps, after = loop.steps(0)["steps"], loop.steps(0)["next"]
    assert after == 4
    assert [s["kind"] for s in steps] == ["prefill", "prefill", "decode", "decode"]
    assert steps[1] == {
        "index": 1, "kind": "prefill", "num_seqs": 1, "num_tokens": 72, "layers": [0, 4],
        "interleaved": False, "start_s": 1.0, "duration_ms": 1000.0,
    }  # fmt: skip
    assert steps[3]["start_s"] == 2.01
    assert loop.steps(3) == {"steps": [steps[3]], "next": 4}
    assert loop.steps(4) == {"steps": [], "next": 4}


def test_the_ring_keeps_4096_steps() -> None:
    loop, _ = make_loop()
    submit(loop, "a", 5, 4200)
    run(loop)
    steps = loop.steps(0)["steps"]
    assert len(steps) == 4096
    assert (steps[0]["index"], steps[-1]["index"], loop.steps(0)["next"]) == (104, 4199, 4200)


@pytest.mark.parametrize(
    ("every", "interleaved", "gap_s"), [(None, 0, 10.01), (4, 2, 4.01), (1, 9, 1.01)], ids=str
)
def test_s01_gap_and_burst_line(
    every: int | None, interleaved: int, gap_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loop, _ = make_loop(interleave=every)
    burst(loop)
    stats = loop.stats()
    assert stats["largest_gap_ms"] == pytest.approx(gap_s * 1e3)
    assert stats["interleaved_decode_steps"] == interleaved
    flags = [s["interleaved"] for s in loop.steps(0)["steps"] if s["kind"] == "decode"]
    assert sum(flags) == interleaved
    lines = [r.getMessage() for r in caplog.records if "prefill burst" in r.getMessage()]
    # the victim's own prefill is the first burst
    assert len(lines) == 2
    assert f"prefill_steps=10 interleaved_decode_steps={interleaved} " in lines[1]
    assert f"largest_gap_ms={gap_s * 1e3:.1f} " in lines[1]


def test_no_gap_is_counted_while_nothing_can_decode() -> None:
    loop, clock = make_loop()
    submit(loop, "a", 5, 3)
    run(loop)
    clock.time += 50.0
    submit(loop, "b", 5, 3)
    run(loop)
    assert loop.stats()["largest_gap_ms"] == pytest.approx(DECODE_S * 1e3)


def test_cancelling_the_last_decodable_request_ends_its_gap() -> None:
    loop, _ = make_loop()
    submit(loop, "a", 5, 60)
    loop.step()
    loop.step()
    loop.cancel("a")
    submit(loop, "b", 1280, 3)
    run(loop)
    assert loop.stats()["largest_gap_ms"] == pytest.approx(DECODE_S * 1e3)


def test_log_lines_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loop, _ = make_loop(log_every=20)
    submit(loop, "a", 300, 51)
    run(loop)
    lines = [r.getMessage() for r in caplog.records]
    prefill = [line for line in lines if line.startswith("prefill step ")]
    decode = [line for line in lines if line.startswith("decode ")]
    assert len(prefill) == 3
    assert (
        "index=2 seqs=1 tokens=44 layers=0-4 duration_ms=1000.0 running=1 waiting=0" in prefill[2]
    )
    assert len(decode) == 2  # 50 decode steps
    assert (
        "steps=20 index=22 seqs=1 tokens_per_s=100.0 step_ms=10.00 largest_gap_ms=10.0" in decode[0]
    )


def test_a_burst_without_any_decode_ends_when_the_loop_is_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    loop, _ = make_loop()
    submit(loop, "a", 300, 1)
    run(loop)
    lines = [r.getMessage() for r in caplog.records if "prefill burst" in r.getMessage()]
    assert lines == [
        "prefill burst done prefill_steps=3 interleaved_decode_steps=0 prefill_tokens=300 "
        "largest_gap_ms=0.0 duration_s=3.000"
    ]


def test_k10_a_failing_step_fails_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    loop, _ = make_loop()
    prompt = submit(loop, "good", 5, 30)
    for _ in range(20):
        loop.step()
    params = SamplingParams(max_tokens=4, seed=0)
    loop.submit(Request("bad", (1, FAIL), params, 0.0))
    events = loop.step()
    assert [(e.request_id, e.token_id, e.finish_reason) for e in events] == [("bad", None, "error")]
    assert events[0].error == (
        "the step that ran this request failed with ArithmeticError: the accelerator is on fire"
    )
    history = [r.getMessage() for r in caplog.records if "step history" in r.getMessage()]
    assert len(history) == 16
    assert "index=19 kind=decode" in history[-1]
    assert any(r.exc_info for r in caplog.records)
    assert run(loop)["good"] == expected_tokens(prompt, 30)[20:]
    assert loop.stats()["used_pages"] == 0
    assert loop.stats()["integrity"] == "ok"


def test_k10_a_result_that_is_not_the_plans_fails_its_requests() -> None:
    loop, _ = make_loop()
    execute = loop._executor.execute
    submit(loop, "a", 5, 3)
    loop._executor.execute = lambda plan: StepResult(plan.index + 1, ())  # type: ignore[method-assign]
    assert [e.finish_reason for e in loop.step()] == ["error"]
    loop._executor.execute = execute  # type: ignore[method-assign]
    prompt = submit(loop, "b", 5, 3)
    assert run(loop) == {"b": expected_tokens(prompt, 3)}


def test_an_interrupt_leaves_nothing_in_flight() -> None:
    loop, _ = make_loop()
    submit(loop, "a", 5, 3)

    def interrupted(plan: StepPlan) -> StepResult:
        raise KeyboardInterrupt

    loop._executor.execute = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    loop.idle()
    stats = loop.stats()
    assert (stats["num_running"], stats["used_pages"], stats["running_step_s"]) == (0, 0, 0.0)


def test_s12_ages_of_steps_and_of_waiting_work() -> None:
    loop, clock = make_loop()
    clock.time += 5.0
    stats = loop.stats()
    assert (stats["running_step_s"], stats["waiting_without_step_s"]) == (0.0, 0.0)
    assert stats["last_step_age_s"] == pytest.approx(5.0)
    submit(loop, "a", 5, 3)
    clock.time += 2.0
    assert loop.stats()["waiting_without_step_s"] == pytest.approx(2.0)
    started, go = threading.Event(), threading.Event()
    execute = loop._executor.execute

    def stuck(plan: StepPlan) -> StepResult:
        started.set()
        assert go.wait(5.0)
        return execute(plan)

    loop._executor.execute = stuck  # type: ignore[method-assign]
    thread = threading.Thread(target=loop.step)
    thread.start()
    assert started.wait(5.0)
    clock.time += 7.0
    stats = loop.stats()
    go.set()
    thread.join()
    assert stats["running_step_s"] == pytest.approx(7.0)
    assert stats["waiting_without_step_s"] == 0.0
    assert stats["num_running"] == 1
    assert loop.stats()["running_step_s"] == 0.0


def test_stats_carry_chunk_numbers_and_extras() -> None:
    limits, info = make_limits({"chunk": 256})
    clock = ManualClock()
    loop = EngineLoop(
        Scheduler(limits), FakeExecutor(), clock, info=info, decode_log_interval=1,
        extra_stats=lambda: {"experts": {"num_slots": 3}},
    )  # fmt: skip
    stats = loop.stats()
    assert (stats["chunk_tokens"], stats["limiting"]) == (256, "max_prefill_length")
    assert stats["experts"] == {"num_slots": 3}
    wanted = {
        "window_pages", "reserved_window_pages", "num_running", "num_waiting", "used_pages",
        "cached_pages", "total_pages", "used_window_pages", "total_window_pages", "prefill_steps",
        "decode_steps", "retractions", "aborted",
    }  # fmt: skip
    assert wanted <= stats.keys()


def test_only_aborts_count_as_aborted() -> None:
    loop, _ = make_loop()
    for name in "ab":
        submit(loop, name, 5, 9)
    assert loop.cancel("a", aborted=False) is not None
    assert loop.cancel("b") is not None
    assert loop.cancel("b") is None
    assert loop.stats()["aborted"] == 1


def test_p06_a_failed_idle_check_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    loop, _ = make_loop()

    def broken() -> None:
        raise AssertionError("page 3 is held twice")

    loop._scheduler.check = broken  # type: ignore[method-assign]
    submit(loop, "a", 5, 2)
    run(loop)
    assert loop.stats()["integrity"] == "AssertionError: page 3 is held twice"
    assert any(r.levelno == logging.ERROR and "page 3" in r.getMessage() for r in caplog.records)


def test_a_rejected_request_leaves_the_loop_without_work() -> None:
    loop, _ = make_loop(num_tokens=1024)
    with pytest.raises(RequestRejectedError):
        submit(loop, "a", 1020, 5)
    assert not loop.has_work
    assert loop.step() == []


def test_close_closes_the_executor_once() -> None:
    loop, _ = make_loop()
    loop.close()
    loop.close()
    assert loop._executor.closed == 1  # type: ignore[attr-defined]


def test_bad_log_interval() -> None:
    limits, info = make_limits({})
    with pytest.raises(ValueError, match="decode_log_interval is 0, expected an integer >= 1"):
        EngineLoop(
            Scheduler(limits), FakeExecutor(), ManualClock(), info=info, decode_log_interval=0
        )
