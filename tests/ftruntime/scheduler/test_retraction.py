"""Optimistic admission: who gives pages up, who gets them, and what a resumed request computes.

Page counts are worked out by hand beside each test; a page holds 128 tokens. The executors of
`support` and `test_prefix_runs` check every page that a step reads.

Mutants run, each noticed here or by the random runs: the oldest gives way; a partial prompt does
not; the retracted goes to the back of the queue, keeps its place among the partly prefilled or
among those that decode; its row is not fresh; prompt log-probabilities told twice; its own pages
counted as cached, or not found; no spare page; pages freed between two slices; kept streams not
dropped; not counted; promises that always grow, forget copies of shared pages or grow a page too
early; copies never adopted; the last part drawn at the prompt's end; no room made; whole outputs
reserved.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from ftruntime.types import Request, SamplingParams, StepPlan
from tests.ftruntime.scheduler.support import Bench, Watched, make_limits, make_request
from tests.ftruntime.scheduler.test_prefix_runs import PrefixExecutor


def bench_of(*, prefix_cache: bool = False, **limits: object) -> Bench:
    made = make_limits(**{"admission": "optimistic", **limits})  # type: ignore[arg-type]
    made = replace(made, prefix_cache=prefix_cache)
    bench = Bench(made, scheduler=Watched(made))
    if prefix_cache:
        bench.executor = PrefixExecutor(made)
    return bench


def retracted(bench: Bench) -> list[str]:
    names: list[str] = []
    assert isinstance(bench.scheduler, Watched)
    bench.scheduler.on_retract = names.append
    return names


def two_on_six_pages(**params: object) -> Bench:
    """Run until the newer of two gives way: with 3 pages each neither can grow."""
    bench = bench_of(num_pages=6)
    names = retracted(bench)
    for name in ("a", "b"):
        bench.submit(make_request(name, 200, max_tokens=500, **params))
    while not names:
        bench.step()
    assert names == ["b"]
    return bench


def first_plans(bench: Bench, name: str) -> list[StepPlan]:
    """The plans that gave a request a row."""
    return [p for p in bench.plans for s in p.seqs if s.request_id == name and s.fresh]


def test_a_prompt_is_enough_to_be_admitted() -> None:
    """Two prompts of 2 pages and a spare one fit into 5, with outputs of 4 pages more."""
    for admission, running in (("reserve", 1), ("optimistic", 2)):
        bench = bench_of(num_pages=6, admission=admission)
        for name in ("a", "b"):
            bench.submit(make_request(name, 200, max_tokens=500))
        bench.steps(4)
        assert bench.scheduler.num_running == running


def test_a_page_for_every_running_request_stays_free() -> None:
    """Beside two prompts of 2 pages, a third needs its own 2 and 2 more."""
    for num_pages, running in ((7, 2), (8, 3)):
        bench = bench_of(num_pages=num_pages)
        for name in ("a", "b", "c"):
            bench.submit(make_request(name, 200, max_tokens=9))
        bench.steps(6)
        assert bench.scheduler.num_running == running


def test_the_newest_gives_its_pages_up_and_both_answers_stay_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """6 pages: with 3 pages each neither can grow. `a` gets its fourth at token 385, `b` waits."""
    caplog.set_level(logging.INFO, logger="ftruntime.scheduler.pressure")
    bench = two_on_six_pages()
    known = 200 + len(bench.tokens("b"))
    assert known == 385, "the fourth page is for position 384"
    assert [seq.request_id for seq in bench.plans[-1].seqs] == ["a"]
    stats = bench.scheduler.stats()
    counts = [stats[name] for name in ("num_running", "num_waiting", "retractions", "used_pages")]
    assert counts == [1, 1, 1, 4]
    assert "retracted request=b tokens=385 computed=384 running=2" in caplog.text
    bench.drain()
    assert bench.scheduler.stats()["retractions"] == 1
    resumed = first_plans(bench, "b")[1]
    assert bench.plans.index(resumed) > bench.trace.rindex("p") - 4
    assert [(len(bench.tokens(name)), bench.reason(name)) for name in ("a", "b")] == [
        (500, "length"), (500, "length"),
    ]  # fmt: skip
    roomy = bench_of(num_pages=60)
    for name in ("a", "b"):
        roomy.submit(make_request(name, 200, max_tokens=500))
    roomy.drain()
    for name in ("a", "b"):
        assert bench.events[name] == roomy.events[name]


def test_resumed_prefill_ends_with_the_next_draw() -> None:
    """Parts of 128 tokens; the last one, and no other, draws token 186 of `b`."""
    bench = two_on_six_pages(presence_penalty=0.5)
    bench.drain()
    index = bench.plans.index(first_plans(bench, "b")[1])
    parts = [plan.seqs[0] for plan in bench.plans[index : index + 4]]
    assert [(s.start, len(s.token_ids)) for s in parts] == [
        (0, 128),
        (128, 128),
        (256, 128),
        (384, 1),
    ]
    assert [s.sample is not None for s in parts] == [False, False, False, True]
    last = parts[-1].sample
    assert last is not None
    assert last.position == 385
    assert {token for token, _, _ in last.adjust} == set(bench.executor.drawn[1][:185])


def fill(bench: Bench) -> None:
    """A sequence of nobody takes all pages that are not promised."""
    kv = bench.scheduler._kv
    kv.admit("outsider", 128 * (kv.total_pages - kv.reserved_pages))


def empty(bench: Bench) -> None:
    assert bench.scheduler._kv.release("outsider")


def test_a_partly_prefilled_prompt_gives_way_and_nothing_passes_it() -> None:
    """`b` has 3 of its 4 pages computed when `a` needs a page for position 256."""
    bench = bench_of(num_pages=12, every=1)
    names = retracted(bench)
    bench.submit(make_request("a", 250, max_tokens=200))
    while 250 + len(bench.events.get("a", ())) < 255:
        bench.step()
    bench.submit(make_request("b", 400, max_tokens=9, prompt_logprobs=0))
    bench.submit(make_request("c", 10, max_tokens=9))
    bench.step()
    fill(bench)
    assert bench.steps(5) == "dpdpd"
    assert names == ["b"]
    assert [s.start for p in bench.plans for s in p.seqs if s.request_id == "b"] == [0, 128, 256]
    assert bench.scheduler.num_running == 1
    assert bench.steps(2) == "dd", "it waits until its whole prompt fits"
    empty(bench)
    bench.drain()
    started = [s.request_id for p in bench.plans for s in p.seqs if s.fresh]
    assert started == ["a", "b", "b", "c"]
    scores = bench.events["b"][0].prompt_logprobs
    assert scores is not None
    assert len(scores) == 399, "those of the first attempt are not told twice"


@pytest.mark.parametrize("groups", [2, 3])
def test_a_chunk_between_two_slices_is_given_up_whole(groups: int) -> None:
    """Pages of a chunk are free once all of it is gone: `c` goes, then `b`."""
    bench = bench_of(num_pages=8, chunk_tokens=256, groups=groups)
    names = retracted(bench)
    bench.submit(make_request("a", 120, max_tokens=60))
    while len(bench.events.get("a", ())) < 9:  # the next decode computes position 128
        bench.step()
    for name in ("b", "c"):
        bench.submit(make_request(name, 100, max_tokens=2))
    bench.step()
    fill(bench)
    chunk = bench.plans[-1]
    assert (chunk.kind, len(chunk.seqs)) == ("prefill", 2)
    bench.step()
    assert names == ["c", "b"]
    plan = bench.plans[-1]
    assert (plan.kind, plan.drop) == ("decode", tuple(seq.row for seq in chunk.seqs))
    assert [seq.request_id for seq in plan.seqs] == ["a"]
    assert bench.scheduler.stats()["used_pages"] == 2
    empty(bench)
    bench.drain()
    assert [len(bench.tokens(name)) for name in ("a", "b", "c")] == [60, 2, 2]


def test_p06_a_request_that_waits_to_return_can_be_cancelled() -> None:
    bench = two_on_six_pages()
    event = bench.scheduler.cancel("b")
    assert event is not None
    assert event.finish_reason == "abort"
    bench.scheduler.check()
    assert bench.scheduler.num_waiting == 0
    bench.drain()


def request_of(name: str, prompt: list[int], max_tokens: int, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, **params)  # type: ignore[arg-type]
    return Request(name, tuple(prompt), sampling, arrival_s=0.0)


@pytest.mark.parametrize("wanted", [None, 0])
def test_with_a_prefix_cache_it_starts_behind_its_own_pages(wanted: int | None) -> None:
    """`b` comes back while its pages stand; what it finds of its own counts as computed."""
    bench = bench_of(num_pages=7, prefix_cache=True)
    names = retracted(bench)
    bench.submit(request_of("a", [token // 128 for token in range(200)], 200))
    bench.submit(request_of("b", [9] * 200, 400, prompt_logprobs=wanted))
    while not names and bench.scheduler.num_running + bench.scheduler.num_waiting == 2:
        if 200 + len(bench.events.get("a", ())) == 384:
            fill(bench)
        bench.step()
    assert names == ["b"]
    empty(bench)
    bench.drain()
    again = first_plans(bench, "b")[1].seqs[-1]
    assert (again.start, again.prompt_targets) == (384, None)
    assert {event.num_cached_tokens for event in bench.events["b"]} == {0}
    told = [event.prompt_logprobs is not None for event in bench.events["b"]]
    assert told == [wanted is not None] + [False] * 399


def test_copies_of_shared_pages_are_not_counted_for_the_last_that_reads_them() -> None:
    """`a` and `b` compute the same 3 pages at once; when `a` has ended, `b` reads one copy of each,
    and its 990 tokens fit into 9 pages."""
    bench = bench_of(num_pages=9, chunk_tokens=1024, window_pages=24, prefix_cache=True)
    names = retracted(bench)
    text = [token // 128 for token in range(390)]
    bench.submit(request_of("a", text, 2))
    bench.submit(request_of("b", text, 600))
    bench.steps(2)
    stats = bench.scheduler.stats()
    assert (stats["num_running"], stats["used_pages"]) == (1, 4)
    bench.drain()
    assert names == []
    assert len(bench.tokens("b")) == 600


def test_reserved_requests_never_give_way() -> None:
    bench = bench_of(num_pages=12, admission="reserve", max_running=8)
    names = retracted(bench)
    for number in range(8):
        bench.submit(make_request(f"r{number}", 100, max_tokens=300))
    bench.drain()
    assert names == []
    assert bench.scheduler.stats()["retractions"] == 0
