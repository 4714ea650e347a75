"""Who is turned away, with which sentence, and who is not."""

from __future__ import annotations

import pytest

from ftruntime.scheduler.admission import check_limits
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.types import RequestRejectedError
from tests.ftruntime.scheduler.support import Bench, make_limits, make_request


def rejected(bench: Bench, num_prompt: int, max_tokens: int = 1) -> RequestRejectedError:
    with pytest.raises(RequestRejectedError) as caught:
        bench.submit(make_request(f"r{num_prompt}+{max_tokens}", num_prompt, max_tokens))
    return caught.value


def test_s08_g14_longer_than_the_pool_names_numbers_and_flag() -> None:
    bench = Bench(make_limits(num_pages=4, max_model_len=4096))
    error = rejected(bench, 600, 16)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    for text in ("616 tokens", "600 in the prompt", "holds 512", "--num-tokens (now 512)"):
        assert text in str(error)
    assert not bench.scheduler.has_work


def test_s08_g14_longer_than_the_context_names_numbers_and_flag() -> None:
    bench = Bench(make_limits(num_pages=64, max_model_len=500))
    error = rejected(bench, 500)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    for text in ("501 tokens", "holds 500", "--max-model-len (now 500)"):
        assert text in str(error)
    bench.submit(make_request("fits", 499, 1))
    bench.drain()
    assert bench.reason("fits") == "length"


def test_explicit_output_beyond_the_context_is_refused() -> None:
    bench = Bench(make_limits(max_model_len=500))
    assert rejected(bench, 100, 401).code == "context_length_exceeded"
    bench.submit(make_request("fits", 100, 400))
    bench.drain()
    assert len(bench.tokens("fits")) == 400


@pytest.mark.parametrize("num_prompt", [1, 100, 384, 385, 511])
def test_s11_exactly_the_pool_is_served_one_more_is_not(num_prompt: int) -> None:
    bench = Bench(make_limits(num_pages=4))
    for total in (511, 512):
        if total > num_prompt:
            bench.submit(make_request(f"t{total}", num_prompt, total - num_prompt))
    bench.drain()
    assert all(bench.reason(request_id) == "length" for request_id in bench.events)
    assert rejected(bench, num_prompt, 513 - num_prompt).status == 400


def test_empty_prompt_is_refused() -> None:
    error = rejected(Bench(make_limits()), 0)
    assert (error.status, str(error)) == (400, "prompt is empty, expected at least 1 token")


def test_full_queue_is_429_and_counts_only_those_that_wait() -> None:
    bench = Bench(make_limits(max_running=2, max_waiting_requests=3))
    for index in range(5):  # two find a free row, before any step was planned
        bench.submit(make_request(f"q{index}", 10))
    error = rejected(bench, 10)
    assert (error.status, error.code) == (429, "queue_full")
    assert "--max-waiting-requests is 3" in str(error)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 3)
    assert rejected(bench, 10).status == 429
    bench.drain()
    assert len(bench.events) == 5


def test_g11_full_queue_by_tokens_is_429_and_loses_nobody() -> None:
    bench = Bench(make_limits(max_running=1, max_waiting_tokens=1000))
    bench.submit(make_request("a", 1500))  # nobody waits: taken, whatever its length
    bench.step()
    bench.submit(make_request("b", 600))
    bench.submit(make_request("c", 400))
    error = rejected(bench, 1)
    assert (error.status, error.code) == (429, "queue_full")
    assert "1001 tokens" in str(error)
    assert "--max-waiting-tokens is 1000" in str(error)
    bench.drain()
    assert sorted(bench.events) == ["a", "b", "c"]


def test_cancelled_waiters_leave_room_in_the_queue() -> None:
    bench = Bench(make_limits(max_running=1, max_waiting_requests=1, max_waiting_tokens=10))
    bench.submit(make_request("a", 10))
    bench.step()
    bench.submit(make_request("b", 10))
    assert rejected(bench, 1).status == 429
    assert bench.scheduler.cancel("b") is not None
    bench.submit(make_request("c", 10))
    bench.drain()
    assert bench.reason("c") == "length"


def test_s10_chunk_that_the_window_pool_cannot_hold_refuses_to_start() -> None:
    # 4 running rows hold up to 8, a chunk of 8 pages takes 7 beyond its row's pair, and page 0
    check_limits(make_limits(chunk_tokens=1024, max_running=4, window_pages=16))
    with pytest.raises(
        ValueError, match="window_pages is 15, expected at least 16: 2 for each of 4"
    ):
        Scheduler(make_limits(chunk_tokens=1024, max_running=4, window_pages=15))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_pages", 0),
        ("chunk_tokens", 0),
        ("chunk_tokens", 200),
        ("max_running", 0),
        ("max_model_len", 0),
        ("max_waiting_requests", -1),
        ("max_waiting_tokens", -1),
    ],
)
def test_wrong_limits_refuse_to_start(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Scheduler(make_limits(**{name: value}))
