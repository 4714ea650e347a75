"""Submit, cancel, plan, commit, fail: what each leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftruntime.types import SeqResult, StepPlan, StepResult, TokenLogprobs
from tests.ftruntime.scheduler.support import EOS, Bench, make_limits, make_request


def planned(bench: Bench) -> StepPlan:
    plan = bench.plan()
    assert plan is not None
    return plan


def test_a_request_from_prompt_to_length() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request("a", 130, max_tokens=3))
    assert bench.step() == []
    (event,) = bench.step()
    assert (event.token_id, event.finish_reason, event.num_cached_tokens) == (
        130 % 50 + 100,
        None,
        0,
    )
    bench.drain()
    assert bench.trace == "ppdd"
    assert bench.tokens("a") == [130, 131, 132]
    assert [e.finish_reason for e in bench.events["a"]] == [None, None, "length"]
    assert [plan.index for plan in bench.plans] == [0, 1, 2, 3]


def test_eos_ends_with_stop_and_reports_the_token() -> None:
    bench = Bench(make_limits(), choose=lambda _, position: EOS if position == 12 else 99)
    bench.submit(make_request("a", 10))
    bench.submit(make_request("b", 10, ignore_eos=True))
    bench.submit(make_request("c", 10, min_tokens=3))
    bench.drain()
    assert bench.tokens("a") == [99, 99, EOS]
    assert bench.reason("a") == "stop"
    assert (len(bench.tokens("b")), bench.reason("b")) == (16, "length")
    assert (len(bench.tokens("c")), bench.reason("c")) == (16, "length")


def test_no_finite_logit_ends_only_that_request() -> None:
    bench = Bench(make_limits(), choose=lambda name, position: -1 if name == "a" else 99)
    bench.submit(make_request("a", 10))
    bench.submit(make_request("b", 10, max_tokens=4))
    bench.drain()
    (event,) = bench.events["a"]
    assert (event.token_id, event.finish_reason) == (None, "error")
    assert event.error == "the model returned no finite logit for the next token"
    assert bench.reason("b") == "length"


def test_logprobs_are_passed_on() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request("a", 10, logprobs=1))
    plan = planned(bench)
    assert plan.seqs[0].sample is not None
    assert plan.seqs[0].sample.num_logprobs == 1
    scores = TokenLogprobs(5, -0.5, ((5, -0.5),))
    result = StepResult(plan.index, (SeqResult(plan.seqs[0].row, "a", 5, scores),))
    (event,) = bench.scheduler.commit(plan, result)
    assert event.logprobs == scores


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 10], ids=lambda n: f"after{n}")
@pytest.mark.parametrize("under_way", [False, True], ids=["between", "under_way"])
def test_p06_abort_frees_exactly_once(steps: int, under_way: bool) -> None:
    """Waiting, in the first, a middle and the last chunk, in decode."""
    bench = Bench(make_limits())
    bench.submit(make_request("a", 300, max_tokens=20))
    bench.submit(make_request("b", 10, max_tokens=20))
    bench.steps(steps)
    plan = planned(bench) if under_way else None
    event = bench.scheduler.cancel("a")
    assert event is not None
    assert (event.request_id, event.token_id, event.finish_reason) == ("a", None, "abort")
    bench.scheduler.check()
    assert bench.scheduler.cancel("a") is None
    if plan is not None:
        assert "a" not in [event.request_id for event in bench.finish(plan)]
    bench.drain()
    assert bench.scheduler.stats()["aborted"] == 1
    assert len(bench.tokens("b")) == 20


def test_p06_abort_right_at_the_finish() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request("a", 10, max_tokens=2))
    bench.step()
    last = planned(bench)
    assert bench.scheduler.cancel("a") is not None
    assert bench.finish(last) == []
    bench.check_empty()
    bench.submit(make_request("a", 10, max_tokens=1))
    bench.step()
    assert bench.reason("a") == "length"
    assert bench.scheduler.cancel("a") is None, "it has ended already"
    bench.check_empty()


def test_p05_late_results_never_reach_a_new_request_of_the_same_id() -> None:
    bench = Bench(make_limits(max_running=1))
    bench.submit(make_request("a", 10))
    plan = planned(bench)
    result = bench.executor.execute(plan)
    assert bench.scheduler.cancel("a") is not None
    bench.submit(make_request("a", 10, max_tokens=1))
    assert bench.keep(bench.scheduler.commit(plan, result)) == []
    assert bench.scheduler.num_waiting == 1
    bench.drain()
    assert len(bench.tokens("a")) == 1


def test_p05_unknown_ids_are_ignored() -> None:
    bench = Bench(make_limits())
    assert bench.scheduler.cancel("never seen") is None
    assert bench.scheduler.stats()["aborted"] == 0


def test_a_failing_step_ends_its_requests_only() -> None:
    bench = Bench(make_limits(max_running=3))
    bench.submit(make_request("victim", 10, max_tokens=4))
    bench.step()
    bench.submit(make_request("bad", 300))
    bench.submit(make_request("late", 10, max_tokens=4))
    plan = planned(bench)
    assert [seq.request_id for seq in plan.seqs] == ["bad"]
    events = bench.scheduler.fail(plan, "the step failed: out of luck")
    assert [(e.request_id, e.finish_reason, e.error) for e in events] == [
        ("bad", "error", "the step failed: out of luck")
    ]
    bench.drain()
    assert bench.reason("victim") == bench.reason("late") == "length"


def test_a_failing_decode_spares_the_partly_prefilled() -> None:
    bench = Bench(make_limits(every=1))
    bench.submit(make_request("victim", 10))
    bench.steps(2)
    bench.submit(make_request("long", 300, max_tokens=2))
    bench.step()
    plan = planned(bench)
    assert (plan.kind, plan.interleaved) == ("decode", True)
    assert [e.request_id for e in bench.scheduler.fail(plan, "no")] == ["victim"]
    bench.drain()
    assert bench.reason("long") == "length"


def test_failing_after_a_cancel_reports_only_the_living() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request("a", 10))
    bench.submit(make_request("b", 10))
    plan = planned(bench)
    bench.scheduler.cancel("a")
    assert [e.request_id for e in bench.scheduler.fail(plan, "no")] == ["b"]
    bench.check_empty()


def test_a_wrong_result_changes_nothing_and_can_be_failed() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request("a", 10, prompt_logprobs=0))
    plan = planned(bench)
    good = bench.executor.execute(plan)
    seq = good.seqs[0]
    wrong = {
        "result.index is 7": replace(good, index=7),
        "result has nothing for row 0": replace(good, seqs=()),
        "expected 'a'": replace(good, seqs=(replace(seq, request_id="z"),)),
        "token_id of 'a' is None": replace(good, seqs=(replace(seq, token_id=None),)),
        "prompt_logprobs of 'a' has 0 entries, expected 9": replace(
            good, seqs=(replace(seq, prompt_logprobs=()),)
        ),
    }
    for sentence, result in wrong.items():
        with pytest.raises(ValueError, match=sentence):
            bench.scheduler.commit(plan, result)
    assert len(bench.scheduler.commit(plan, good)) == 1
    with pytest.raises(ValueError, match="step 0 is not under way"):
        bench.scheduler.commit(plan, good)
    with pytest.raises(ValueError, match="step 0 is not under way"):
        bench.scheduler.fail(plan, "no")


def test_one_plan_at_a_time() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request("a", 10))
    planned(bench)
    with pytest.raises(RuntimeError, match="step 0 is under way"):
        bench.scheduler.plan(0.0)


def test_stats_and_properties() -> None:
    bench = Bench(make_limits(num_pages=20, window_pages=21, max_running=2, every=1))
    for name in "abc":
        bench.submit(make_request(name, 200, max_tokens=20))
    bench.steps(3)
    scheduler = bench.scheduler
    assert bench.trace == "ppd"
    assert scheduler.stats() == {
        "num_running": 1,
        "num_waiting": 2,
        "used_pages": 2,
        "cached_pages": 0,
        "total_pages": 20,
        "used_window_pages": 2,
        "total_window_pages": 20,
        "interleaved_decode_steps": 1,
        "prefill_streak": 0,
        "prefill_steps": 2,
        "decode_steps": 1,
        "retractions": 0,
        "aborted": 0,
    }
    assert scheduler.has_work
    assert scheduler.has_unfinished_prefill, "b can be admitted"
    assert scheduler.request_ids == ("a", "b", "c")
    bench.steps(3)
    assert bench.trace == "ppdpdp"
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert not scheduler.has_unfinished_prefill, "c has no row"
    bench.drain()
    assert not scheduler.has_work


def test_s04_a_stream_that_ends_inside_a_burst_leaves_no_empty_step() -> None:
    bench = Bench(make_limits(every=2))
    bench.submit(make_request("victim", 10, max_tokens=3))
    bench.steps(2)
    bench.submit(make_request("long", 8 * 128, max_tokens=2))
    bench.drain()
    assert bench.trace == "pd" + "ppd" + "pppppp" + "d"
    assert all(plan.num_tokens > 0 for plan in bench.plans)


def test_two_hundred_aborts_leave_every_page_free() -> None:
    bench = Bench(make_limits(every=2))
    for index in range(200):
        bench.submit(make_request(f"r{index}", 1 + 37 * index % 400, max_tokens=50))
        for _ in range(index % 5):
            bench.step()
        assert bench.scheduler.cancel(f"r{index}") is not None
        bench.scheduler.check()
        if index % 5 == 3:
            bench.check_empty()
    bench.check_empty()
