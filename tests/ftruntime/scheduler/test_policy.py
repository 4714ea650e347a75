"""The interleave rules: truth table, whole traces, and policies wrong in one rule each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftruntime.scheduler.decode import DecodeManager
from ftruntime.scheduler.policy import InterleavePolicy, interleave_notice
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.types import SchedulerLimits, StepPlan
from tests.ftruntime.scheduler.support import Bench, make_limits, make_request


@pytest.mark.parametrize(
    ("every", "due"),
    [
        # due after 0, 1, 2, ... scheduled chunks
        (None, [False] * 10),
        (1, [False] + [True] * 9),
        (3, [False] * 3 + [True] * 7),
        (8, [False] * 8 + [True] * 2),
    ],
    ids=str,
)
def test_truth_table(every: int | None, due: list[bool]) -> None:
    policy = InterleavePolicy(every)
    for streak, expected in enumerate(due):
        assert (policy.streak, policy.decode_is_due()) == (streak, expected)
        assert policy.decode_is_due() == expected, "asking changes nothing"
        policy.prefill_scheduled()
    policy.decode_planned()
    assert (policy.streak, policy.decode_is_due()) == (0, False)


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "8"], ids=repr)
def test_invalid_numbers_are_refused(every: object) -> None:
    with pytest.raises(ValueError, match=r"decode_interleave_every is .* expected an integer >= 1"):
        InterleavePolicy(every)  # type: ignore[arg-type]


MakeScheduler = Callable[[SchedulerLimits], Scheduler]


def burst(make: MakeScheduler) -> str:
    """Decodes with nothing to prefill, then a prompt of five chunks, N = 2."""
    bench = make_bench(make)
    bench.submit(make_request("victim", 10, max_tokens=100))
    bench.steps(3)
    bench.submit(make_request("long", 5 * 128, max_tokens=100))
    bench.steps(9)
    return bench.trace


def debt(make: MakeScheduler) -> str:
    """Five chunks with no row to decode, then three more chunks, N = 2."""
    bench = make_bench(make)
    bench.submit(make_request("first", 5 * 128, max_tokens=100))
    bench.submit(make_request("second", 3 * 128, max_tokens=100))
    bench.steps(11)
    return bench.trace


def cancelled_victim(make: MakeScheduler) -> str:
    """The only running row is cancelled when its decode is due, N = 2."""
    bench = make_bench(make)
    bench.submit(make_request("victim", 10, max_tokens=100))
    bench.steps(2)
    bench.submit(make_request("first", 5 * 128, max_tokens=100))
    bench.submit(make_request("second", 5 * 128, max_tokens=100))
    bench.steps(5)
    assert bench.scheduler.cancel("victim") is not None
    bench.steps(4)
    return bench.trace


def make_bench(make: MakeScheduler) -> Bench:
    limits = make_limits(every=2)
    return Bench(limits, scheduler=make(limits))


EXPECTED = {
    burst: "pdd" + "ppdppdp" + "dd",
    debt: "ppppp" + "d" + "ppd" + "pd",
    # the empty decode spent the allowance, so the next one is two chunks later
    cancelled_victim: "pd" + "ppdpp" + "ppd" + "p",
}


@pytest.mark.parametrize("scenario", EXPECTED, ids=lambda s: s.__name__)
def test_s04_traces(scenario: Callable[[MakeScheduler], str]) -> None:
    assert scenario(Scheduler) == EXPECTED[scenario]


class LateByOne(InterleavePolicy):
    def decode_is_due(self) -> bool:
        return self.every is not None and self.streak > self.every


class DebtForgiven(InterleavePolicy):
    """A decode that is due and finds no row is forgotten."""

    def decode_is_due(self) -> bool:
        due = super().decode_is_due()
        if due:
            super().decode_planned()
        return due


class OnlyDueDecodesClear(InterleavePolicy):
    """A decode that ran because no prefill could leaves the streak alone."""

    def decode_planned(self) -> None:
        if self.decode_is_due():
            super().decode_planned()


class NeverClears(InterleavePolicy):
    def decode_planned(self) -> None:
        pass


class EmptyDecodeIsFree(Scheduler):
    """A decode that holds no live row keeps the allowance."""

    def _plan_decode(self) -> StepPlan | None:
        return super()._plan_decode() if self._decode.rows else None


def with_policy(policy: type[InterleavePolicy]) -> MakeScheduler:
    return lambda limits: Scheduler(limits, policy=policy(limits.decode_interleave_every))


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        (with_policy(LateByOne), burst),
        (with_policy(OnlyDueDecodesClear), burst),
        (with_policy(NeverClears), burst),
        (with_policy(DebtForgiven), debt),
        (EmptyDecodeIsFree, cancelled_victim),
    ],
    ids=["LateByOne", "OnlyDueDecodesClear", "NeverClears", "DebtForgiven", "EmptyDecodeIsFree"],
)
def test_wrong_policies_are_seen(
    mutant: MakeScheduler, scenario: Callable[[MakeScheduler], str]
) -> None:
    assert scenario(mutant) != EXPECTED[scenario]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, "p" * 58),
        (8, ("p" * 8 + "d") * 7 + "pp"),
        (1, "pd" * 57 + "p"),
    ],
    ids=str,
)
def test_s01_a_long_prompt_of_58_chunks(every: int | None, expected: str) -> None:
    bench = Bench(make_limits(every=every))
    bench.submit(make_request("victim", 100, max_tokens=200))
    bench.steps(2)
    bench.submit(make_request("long", 57 * 128 + 1, max_tokens=4))
    assert bench.steps(len(expected)) == expected
    assert bench.steps(1) == "d", "the prompt is done"
    burst = bench.plans[2:-1]
    assert all(plan.interleaved == (plan.kind == "decode") for plan in burst)
    assert not bench.plans[-1].interleaved
    assert bench.scheduler.stats()["interleaved_decode_steps"] == expected.count("d")


def test_s01_texts_do_not_depend_on_the_interleave_number() -> None:
    texts = []
    for every in (None, 1, 8):
        bench = Bench(make_limits(every=every))
        bench.submit(make_request("victim", 100, max_tokens=60))
        bench.steps(5)
        bench.submit(make_request("long", 30 * 128, max_tokens=4))
        bench.drain()
        texts.append(bench.tokens("victim"))
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 60


def test_unset_the_decode_manager_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    bench = Bench(make_limits())
    bench.submit(make_request("victim", 10, max_tokens=100))
    bench.steps(2)
    bench.submit(make_request("long", 6 * 128))
    can_run, build = DecodeManager.can_run, DecodeManager.build
    assert isinstance(can_run, property)
    monkeypatch.setattr(
        DecodeManager, "can_run", property(lambda self: asked.append("can_run") or True)
    )
    monkeypatch.setattr(DecodeManager, "build", lambda self: asked.append("build") or build(self))
    assert bench.steps(6) == "pppppp"
    assert asked == []
    assert bench.steps(1) == "d"
    assert asked == ["can_run", "build"]


def test_s02_six_chunks_with_n_8_and_2() -> None:
    traces = {}
    for every in (8, 2):
        bench = Bench(make_limits(every=every))
        bench.submit(make_request("victim", 10, max_tokens=100))
        bench.steps(2)
        bench.submit(make_request("long", 6 * 128, max_tokens=4))
        traces[every] = bench.steps(9)
    assert traces == {8: "ppppppddd", 2: "ppdppdppd"}


def test_s02_notice_says_when_n_cannot_act() -> None:
    # 43000 tokens in chunks of 8192 are 6 chunks; a 9th is needed for N = 8
    notice = interleave_notice(8, chunk_tokens=8192, max_model_len=43_000)
    assert notice is not None
    for number in ("is 8", "42999 tokens", "at most 6 chunks of 8192", "from 65537 tokens on"):
        assert number in notice
    assert interleave_notice(5, chunk_tokens=8192, max_model_len=43_000) is None
    # the border: N chunks and one token more, and one position for the output
    assert interleave_notice(2, chunk_tokens=128, max_model_len=258) is None
    assert interleave_notice(2, chunk_tokens=128, max_model_len=257) is not None
