"""Chunks: what shares a step, where parts end, who is admitted."""

from __future__ import annotations

from ftruntime.kvcache.manager import KVManager
from ftruntime.scheduler.prefill import PrefillManager
from ftruntime.scheduler.table import RequestTable
from tests.ftruntime.scheduler.support import Bench, make_limits, make_request


def parts(bench: Bench) -> list[tuple[str, int, int]]:
    """Of the newest step: request, start, number of tokens."""
    return [(seq.request_id, seq.start, len(seq.token_ids)) for seq in bench.plans[-1].seqs]


def test_prompts_share_a_step_and_parts_end_on_page_edges() -> None:
    bench = Bench(make_limits(chunk_tokens=384, max_running=4))
    for name, length in (("a", 100), ("b", 50), ("c", 500), ("d", 20)):
        bench.submit(make_request(name, length))
    bench.step()
    # 234 tokens are left for c: one page; d is not let past it
    assert parts(bench) == [("a", 0, 100), ("b", 0, 50), ("c", 0, 128)]
    bench.step()
    # the rest of c is 372 tokens, d's 20 do not fit into the 12 left
    assert parts(bench) == [("c", 128, 372)]
    bench.step()
    assert parts(bench) == [("d", 0, 20)]
    assert bench.trace == "ppp"
    assert bench.steps(1) == "d"
    assert [seq.request_id for seq in bench.plans[-1].seqs] == ["a", "b", "c", "d"]


def test_a_rest_smaller_than_a_page_stays_empty_for_a_longer_prompt() -> None:
    bench = Bench(make_limits(chunk_tokens=128))
    bench.submit(make_request("a", 100))
    bench.submit(make_request("b", 29))
    bench.submit(make_request("c", 1))
    bench.step()
    assert parts(bench) == [("a", 0, 100)]
    assert bench.scheduler.num_waiting == 2
    bench.step()
    assert parts(bench) == [("b", 0, 29), ("c", 0, 1)]


def test_k07_ten_steps_for_10240_tokens_at_1024() -> None:
    bench = Bench(make_limits(num_pages=100, chunk_tokens=1024))
    bench.submit(make_request("a", 10 * 1024, max_tokens=2))
    bench.drain()
    assert bench.trace == "p" * 10 + "d"
    assert [plan.num_tokens for plan in bench.plans] == [1024] * 10 + [1]


def test_first_plan_is_fresh_and_only_the_last_part_samples() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request("a", 300))
    bench.steps(4)
    seqs = [plan.seqs[0] for plan in bench.plans]
    assert [seq.fresh for seq in seqs] == [True, False, False, False]
    assert [seq.sample is not None for seq in seqs] == [False, False, True, True]
    assert [seq.sample.position for seq in seqs if seq.sample] == [300, 301]
    assert [[page[0] for page in seq.new_pages] for seq in seqs] == [[0], [1], [2], []]


def test_prompt_logprobs_come_with_the_first_token() -> None:
    bench = Bench(make_limits())
    bench.submit(make_request("a", 300, max_tokens=3, prompt_logprobs=2))
    bench.submit(make_request("b", 1, max_tokens=1, prompt_logprobs=0))
    bench.submit(make_request("c", 5, max_tokens=1))
    bench.drain()
    prompt = bench.executor.requests["a"].prompt_token_ids
    targets = [
        seq.prompt_targets for plan in bench.plans for seq in plan.seqs if seq.request_id == "a"
    ]
    assert targets == [prompt[1:129], prompt[129:257], prompt[257:300], None, None]
    scores = bench.events["a"][0].prompt_logprobs
    assert scores is not None
    assert tuple(score.token_id for score in scores) == prompt[1:]
    assert [event.prompt_logprobs for event in bench.events["a"][1:]] == [None, None]
    assert bench.events["b"][0].prompt_logprobs == ()
    assert bench.events["c"][0].prompt_logprobs is None
    assert bench.plans[0].seqs[0].num_prompt_logprobs == 2


def test_admission_waits_for_a_row() -> None:
    bench = Bench(make_limits(max_running=2))
    for name in "abc":
        bench.submit(make_request(name, 10, max_tokens=3))
    assert bench.steps(3) == "pdd"
    assert bench.reason("a") == "length"
    assert bench.steps(1) == "p"
    assert parts(bench) == [("c", 0, 10)]


def test_admission_never_promises_more_pages_than_there_are() -> None:
    bench = Bench(make_limits(num_pages=4))
    bench.submit(make_request("a", 10, max_tokens=300))  # 3 pages in the end, 1 at first
    bench.submit(make_request("b", 10, max_tokens=200))  # 2 pages
    bench.step()
    assert parts(bench) == [("a", 0, 10)]
    assert bench.steps(298) == "d" * 298
    assert not any(plan.interleaved for plan in bench.plans), "b could not run"
    bench.step()
    assert bench.reason("a") == "length"
    assert bench.steps(1) == "p"


def test_s14_the_head_blocks_for_at_most_the_output_of_those_that_run() -> None:
    bench = Bench(make_limits(num_pages=10, max_running=6))
    bench.submit(make_request("holder", 9 * 128 - 40, max_tokens=40))  # 9 of 10 pages
    bench.steps(9)
    bench.submit(make_request("big", 500, max_tokens=12))
    tiny = [f"tiny{index}" for index in range(5)]
    for name in tiny:
        bench.submit(make_request(name, 5, max_tokens=2))
    # strict order: nobody passes the head, which waits for the holder's remaining 39 tokens
    assert bench.steps(39) == "d" * 39
    assert bench.reason("holder") == "length"
    assert bench.steps(4) == "pppp"
    bench.drain(limit=20)
    first = [
        next(i for i, p in enumerate(bench.plans) if _holds(p, name)) for name in ["big", *tiny]
    ]
    assert first == sorted(first)
    assert all(bench.reason(name) == "length" for name in tiny)


def _holds(plan: object, request_id: str) -> bool:
    return any(seq.request_id == request_id for seq in plan.seqs)  # type: ignore[attr-defined]


def test_discard_forgets_queued_and_partial_prompts() -> None:
    table, kv = RequestTable(2), KVManager(10, 11)
    prefill = PrefillManager(table, kv, chunk_tokens=128)
    rows = [table.add(make_request(name, 300)) for name in "ab"]
    for row in rows:
        prefill.enqueue(row)
    assert (prefill.num_waiting, prefill.waiting_tokens) == (2, 600)
    prefill.build()
    assert prefill.partial is rows[0]
    prefill.discard(rows[0])
    prefill.discard(rows[1])
    prefill.discard(rows[1])
    assert prefill.partial is None
    assert (prefill.num_waiting, prefill.waiting_tokens, prefill.can_run()) == (0, 0, False)
