"""Layer slices: when a decode cuts in, what N still counts, what an abort between two leaves.

Named mutants stand beside their tests. Run by hand, each noticed: uneven slices; a chunk counted
with its first slice; the drop forgotten after a failed step.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ftruntime.scheduler.chunk import even_bounds
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.scheduler.table import RequestRow
from ftruntime.types import SchedulerLimits
from tests.ftruntime.scheduler.support import Bench, make_limits, make_request

NUM_LAYERS = 7


def make_bench(groups: int | None, every: int | None = None, *, chunk_tokens: int = 128) -> Bench:
    limits = make_limits(groups=groups, every=every, chunk_tokens=chunk_tokens)
    return Bench(replace(limits, num_layers=NUM_LAYERS))


@pytest.mark.parametrize("num_layers", [1, 2, 6, 7, 43, 61])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8, 43, 100])
def test_slices_are_as_even_as_possible(num_layers: int, groups: int) -> None:
    bounds = even_bounds(num_layers, groups)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, num_layers)
    assert len(sizes) == min(groups, num_layers)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (make_limits(groups=0), "prefill_layer_groups is 0, expected >= 1, or unset"),
        (make_limits(gap_s=0.0), "max_decode_gap_s is 0.0, expected > 0, or unset"),
        (make_limits(gap_s=-1.0), "max_decode_gap_s is -1.0, expected > 0, or unset"),
        (make_limits(gap_s=float("nan")), "max_decode_gap_s is nan, expected > 0, or unset"),
    ],
    ids=["groups", "zero", "negative", "nan"],
)
def test_bad_limits_are_refused(limits: SchedulerLimits, sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:
        Scheduler(limits)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("groups", "every", "expected"),
    [
        # a victim decodes, then a prompt of three chunks
        (None, None, "ppp" + "d"),
        (1, None, "ppp" + "d"),
        (2, None, "pd" * 6),
        (3, None, "pd" * 9),
        (1, 2, "ppdp" + "d"),
        # a decode after every slice goes before any N
        (2, 1, "pd" * 6),
        (2, 2, "pd" * 6),
    ],
    ids=str,
)
def test_s01_a_decode_after_every_slice(
    groups: int | None, every: int | None, expected: str
) -> None:
    bench = make_bench(groups, every)
    bench.submit(make_request("victim", 10, max_tokens=100))
    while bench.trace[-2:] != "dd":
        bench.step()
    bench.submit(make_request("long", 300, max_tokens=20))
    assert bench.steps(len(expected)) == expected
    bench.drain()
    burst = [p for p in bench.plans if p.kind == "prefill" and p.seqs[0].request_id == "long"]
    bounds = even_bounds(NUM_LAYERS, groups or 1)
    assert [p.layers for p in burst] == [*itertools.pairwise(bounds)] * 3
    assert bench.scheduler.stats()["prefill_streak"] == 0


def test_n_counts_whole_chunks_and_any_decode_clears_it() -> None:
    bench = make_bench(2, 3)
    bench.submit(make_request("first", 300, max_tokens=5))
    streaks = []
    for _ in range(6):  # nobody can decode: three chunks of two slices
        bench.step()
        streaks.append(bench.scheduler.stats()["prefill_streak"])
    assert (bench.trace, streaks) == ("pppppp", [0, 1, 1, 2, 2, 3])
    bench.submit(make_request("second", 300, max_tokens=5))
    assert bench.steps(3) == "dpd"
    assert bench.scheduler.stats()["prefill_streak"] == 0


def test_decodes_between_slices_are_interleaved_ones() -> None:
    bench = make_bench(3)
    bench.submit(make_request("victim", 10, max_tokens=40))
    bench.steps(3)
    bench.submit(make_request("last", 100, max_tokens=3))
    bench.drain()
    decodes = [p.interleaved for p in bench.plans if p.kind == "decode"]
    # one behind the victim's last slice, two within the chunk; the next runs behind its last slice
    assert decodes[:4] == [True, True, True, False]
    assert sum(decodes) == bench.scheduler.stats()["interleaved_decode_steps"] == 3


def at_page_edge(groups: int = 3, make: type[Scheduler] = Scheduler) -> Bench:
    """A victim whose next decode takes a page, and two prompts in a chunk one slice in."""
    bench = make_bench(groups, chunk_tokens=256)
    bench.scheduler = make(bench.limits)
    bench.submit(make_request("victim", 120, max_tokens=60))
    bench.steps(groups)
    while len(bench.tokens("victim")) < 9:  # the next decode computes position 128
        bench.step()
    bench.submit(make_request("a", 100, max_tokens=9))
    bench.submit(make_request("b", 100, max_tokens=9))
    bench.step()
    plan = bench.plans[-1]
    assert (plan.kind, len(plan.seqs), plan.layers) == ("prefill", 2, (0, 2))
    return bench


class FreesPagesBetweenSlices(Scheduler):
    def _end(self, row: RequestRow) -> None:
        chunk, self._chunks._chunk = self._chunks.current, None
        super()._end(row)
        self._chunks._chunk = chunk


def abort_one(bench: Bench) -> None:
    assert bench.scheduler.cancel("a") is not None
    for _ in range(2):
        bench.steps(2)
    bench.drain()


def test_p06_pages_of_an_aborted_prompt_stay_until_its_chunk_ends() -> None:
    bench = at_page_edge()
    used = bench.scheduler.stats()["used_pages"]
    assert bench.scheduler.cancel("a") is not None
    bench.scheduler.check()
    assert bench.scheduler.stats()["used_pages"] == used
    assert bench.scheduler.num_running == 2, "its row is free at once"
    bench.submit(make_request("a", 100, max_tokens=2))
    assert bench.scheduler.cancel("a") is not None, "a request of the same id holds no page"
    bench.scheduler.check()
    assert bench.scheduler.stats()["used_pages"] == used
    bench.drain()
    assert len(bench.tokens("b")) == 9
    assert len(bench.tokens("victim")) == 60
    abort_one(at_page_edge())


def test_pages_freed_between_slices_are_seen() -> None:
    bench = at_page_edge(make=FreesPagesBetweenSlices)
    with pytest.raises(AssertionError):
        abort_one(bench)


def test_p06_a_chunk_that_everybody_left_is_dropped_at_once() -> None:
    bench = at_page_edge()
    rows = tuple(seq.row for seq in bench.plans[-1].seqs)
    for name in "ab":
        assert bench.scheduler.cancel(name) is not None
    bench.scheduler.check()
    assert bench.scheduler.num_running == 1
    assert not bench.scheduler.has_unfinished_prefill
    bench.step()
    assert (bench.plans[-1].kind, bench.plans[-1].drop) == ("decode", rows)
    bench.drain()
    assert [plan.drop for plan in bench.plans if plan.drop] == [rows]


def test_everybody_leaves_while_a_slice_runs() -> None:
    bench = at_page_edge()
    bench.step()
    plan = bench.plan()
    assert plan is not None
    assert plan.layers == (2, 4)
    for name in "ab":
        assert bench.scheduler.cancel(name) is not None
    bench.scheduler.check()
    assert bench.finish(plan) == []
    bench.step()
    assert len(bench.plans[-1].drop) == 2
    bench.drain()


@pytest.mark.parametrize("which", [0, 1, 2], ids="slice{}".format)
def test_k10_a_failing_slice_fails_its_chunk_only(which: int) -> None:
    bench = at_page_edge()
    if which == 0:
        bench.scheduler.cancel("a")
        bench.scheduler.cancel("b")
        bench.drain()
        bench.submit(make_request("victim", 120, max_tokens=60))
        bench.steps(4)
        bench.submit(make_request("a", 100, max_tokens=9))
        bench.submit(make_request("b", 100, max_tokens=9))
    else:
        bench.steps(2 * which - 1)
    plan = bench.plan()
    assert plan is not None
    assert (plan.kind, plan.layers[0]) == ("prefill", (0, 2, 4)[which])
    if which:
        bench.executor.kept.clear()  # as an executor that raises leaves it
    events = bench.scheduler.fail(plan, "no")
    assert [(e.request_id, e.finish_reason) for e in events] == [("a", "error"), ("b", "error")]
    bench.scheduler.check()
    assert bench.scheduler.num_running == 1
    bench.drain()
    assert bench.reason("victim") == "length"


def test_a_failing_decode_between_slices_spares_the_chunk() -> None:
    bench = at_page_edge()
    plan = bench.plan()
    assert plan is not None
    assert plan.kind == "decode"
    assert [e.request_id for e in bench.scheduler.fail(plan, "no")] == ["victim"]
    bench.drain()
    assert len(bench.tokens("a")) == len(bench.tokens("b")) == 9


def test_what_a_failed_step_was_to_drop_is_dropped_by_the_next() -> None:
    bench = at_page_edge()
    rows = tuple(seq.row for seq in bench.plans[-1].seqs)
    for name in "ab":
        bench.scheduler.cancel(name)
    plan = bench.plan()
    assert plan is not None
    bench.scheduler.fail(plan, "no")
    bench.submit(make_request("c", 300, max_tokens=2))
    bench.step()
    assert bench.plans[-1].drop == rows
    bench.drain()


def test_a_new_request_waits_one_step_behind_an_owed_decode() -> None:
    bench = make_bench(2)
    bench.submit(make_request("victim", 10, max_tokens=60))
    bench.steps(4)
    bench.submit(make_request("late", 100, max_tokens=60))
    before = len(bench.plans)
    while bench.plans[-1].seqs[0].request_id != "late":
        bench.step()
    assert len(bench.plans) - before <= 2
