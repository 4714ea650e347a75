"""What a small server takes, what it queues and what it refuses; chunk limits in the open.

The pool holds 8 pages, so 1024 tokens; one request runs, two may wait.
Mutants tried: `>=` for `>` against the capacity, the queue's tokens not counted, one request more
in the queue, the chunk flag ignored.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.live import Json, Launcher, Live, Stream, greedy, until

CAPACITY = 1024
FLAGS = (
    "--numerics", "exact", "--num-tokens", str(CAPACITY), "--max-running-requests", "1",
    "--max-waiting-requests", "2", "--max-waiting-tokens", "1200",
)  # fmt: skip


def ids(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 490), k=count)


@pytest.fixture(scope="module")
def small(launcher: Launcher) -> Iterator[Live]:
    with launcher.serving(*FLAGS) as live:
        yield live


@contextmanager
def one_running(server: Live) -> Iterator[None]:
    """The only row is taken by a stream that would go on for long."""
    with server.http.stream(
        "POST", "/v1/completions", json=greedy("I run", 1000) | {"stream": True}
    ) as answer:
        lines = answer.iter_lines()  # closing it would close the connection
        next(lines)
        yield
    server.wait_idle()


def wait(server: Live, body: Json) -> Stream:
    """A request that is in the queue when this returns."""
    before = server.stats()["num_waiting"]
    stream = Stream(server, body)
    until(lambda: server.stats()["num_waiting"] == before + 1, 10, "it does not wait")
    return stream


def error_of(server: Live, body: Json, status: int) -> Json:
    answer = server.post("/v1/completions", body)
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize("prompt_tokens", [1000, 1023, 640])
def test_s11_prompt_and_output_up_to_the_capacity_are_served(
    small: Live, prompt_tokens: int
) -> None:
    room = CAPACITY - prompt_tokens
    few = prompt_tokens < 1000  # 384 tokens of output would take long; a stop ends them
    extra = {"stop_token_ids": list(range(512))} if few else {}
    for max_tokens in (room - 1, room):
        if max_tokens == 0:
            continue
        choice = small.complete(ids(prompt_tokens), max_tokens, **extra)
        assert choice["finish_reason"] == ("stop" if few else "length")
        if not few:
            assert choice["usage"]["total_tokens"] == prompt_tokens + max_tokens
    error = error_of(small, greedy(ids(prompt_tokens), room + 1), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(CAPACITY) in error["message"]
    assert str(prompt_tokens) in error["message"]


def test_s08_a_prompt_above_the_pool_is_refused_at_once(small: Live) -> None:
    for count in (CAPACITY, CAPACITY + 1, 50_000):
        since = small.next_step()
        error = error_of(small, greedy(ids(count), 1), 400)
        assert small.next_step() == since
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        message = error["message"]
        assert str(count) in message
        assert str(CAPACITY) in message
        assert "--max-model-len" in message
        assert "--num-tokens" in message
    print(f"\n{error['message']}")


def test_s08_the_start_warns_of_a_small_context(small: Live) -> None:
    line = small.wait_log(r"warning .*served context is far below .*")[0]
    assert "max_model_len=1024" in line
    assert "model=65536" in line


def test_h14_without_max_tokens_the_rest_of_the_context_is_the_limit(small: Live) -> None:
    body = {"prompt": ids(CAPACITY - 10), "temperature": 0, "ignore_eos": True}
    answer = small.post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["choices"][0]["finish_reason"] == "length"


def test_one_more_request_than_may_wait_gets_429(small: Live) -> None:
    with one_running(small):
        waiting = [wait(small, greedy(ids(10, i), 2)) for i in range(2)]
        answer = small.post("/v1/completions", greedy("one more", 2))
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert "--max-waiting-requests is 2" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        refused = Stream(small, greedy("one more", 2)).join()
        assert refused.status == 429
    assert [len(stream.join().choices) > 0 for stream in waiting] == [True, True]
    assert small.complete("one more", 2)["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_a_request_of_more_sequences_than_may_wait_is_served(small: Live, streamed: bool) -> None:
    """Four prompts with two choices each, where one runs and two may wait."""
    body = greedy(["a", "b", "c", "d"], 3, n=2)
    if streamed:
        stream = Stream(small, body).join()
        assert not stream.errors
        ends = [c["index"] for c in stream.choices if c["finish_reason"] == "length"]
        assert sorted(ends) == list(range(8))
    else:
        answer = small.post("/v1/completions", body).json()
        assert answer["usage"]["completion_tokens"] == 24
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts[::2] == texts[1::2]
        assert len(set(texts)) > 1
    small.wait_idle()


def test_a_request_of_many_sequences_is_refused_as_a_whole(small: Live) -> None:
    with one_running(small):
        waiting = [wait(small, greedy(ids(10, i), 2)) for i in range(2)]
        assert Stream(small, greedy("one more", 2, n=4)).join().status == 429
        assert small.stats()["num_waiting"] == 2
    for stream in waiting:
        assert stream.join().done


def test_g11_more_tokens_than_may_wait_get_429(small: Live) -> None:
    with one_running(small):
        waiting = wait(small, greedy(ids(1000), 2))
        error = error_of(small, greedy(ids(201), 2), 429)
        assert error["code"] == "queue_full"
        assert "1201 tokens would be waiting" in error["message"]
        assert "--max-waiting-tokens is 1200" in error["message"]
        second = wait(small, greedy(ids(200), 2))
    for stream in (waiting, second):
        assert stream.join().choices[-1]["finish_reason"] == "length"


def test_g11_of_a_burst_of_long_prompts_none_is_lost(small: Live) -> None:
    """Eight prompts of 900 tokens: one runs, one waits, none of the others hangs."""
    streams = [Stream(small, greedy(ids(900, i), 2)) for i in range(8)]
    statuses = sorted(stream.join().status or 0 for stream in streams)
    print(f"\nstatuses {statuses}")
    assert set(statuses) == {200, 429}
    assert all(stream.done for stream in streams if stream.status == 200)
    small.wait_idle()


def test_k07_an_explicit_chunk_limit_is_honoured_and_shown(launcher: Launcher) -> None:
    """10240 tokens in ten steps, with window pages for more."""
    flags = (
        "--max-prefill-length", "1024", "--num-tokens", "12800", "--swa-full-tokens-ratio", "0.5",
        "--numerics", "exact",
    )  # fmt: skip
    with launcher.serving(*flags) as live:
        line = live.wait_log(r"plan ready chunk_tokens=(\d+) limiting=(\S+)")
        stats, since, log_at = live.stats(), live.next_step(), len(live.log())
        assert (int(line[1]), line[2]) == (1024, "max_prefill_length")
        assert (stats["chunk_tokens"], stats["limiting"]) == (1024, "max_prefill_length")
        start_s = time.monotonic()
        choice = live.complete(ids(10 * 1024), 3)
        print(f"\n10240 tokens in {time.monotonic() - start_s:.1f} s")
        assert choice["usage"]["total_tokens"] == 10243
        live.wait_log("prefill burst done prefill_steps=10 ", after=log_at)
        lines = re.findall(r"prefill step index=\d+ seqs=1 tokens=(\d+)", live.log()[log_at:])
        assert lines == ["1024"] * 10
        sizes = [s["num_tokens"] for s in live.steps(since) if s["kind"] == "prefill"]
        assert sizes == [1024] * 10
        live.wait_idle()


def test_k07_the_window_pool_may_be_the_bound_and_says_so(small: Live) -> None:
    """One running request: 8 reserved pages, 8 more, half of 7 for a chunk."""
    line = small.wait_log(r"prefill chunk clamped chunk_tokens=(\d+) .*limiting=(\S+) (.*)")
    stats = small.stats()
    assert (int(line[1]), line[2]) == (3 * 128, "window_pages")
    assert (stats["chunk_tokens"], stats["limiting"]) == (3 * 128, "window_pages")
    assert (stats["window_pages"], stats["reserved_window_pages"]) == (16, 8)
    assert "--swa-full-tokens-ratio" in line[3]


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("RUN_SLOW") != "1", reason="takes minutes, set RUN_SLOW=1")
@pytest.mark.parametrize("count", [20_000, 32_000, 64_000])
def test_k09_long_cold_prompts_at_defaults_are_answered(launcher: Launcher, count: int) -> None:
    with launcher.serving() as live:
        live.http.timeout = 1200
        start_s = time.monotonic()
        choice = live.complete(ids(count), 3)
        stats = live.wait_idle()
        print(f"\n{count} tokens: {time.monotonic() - start_s:.1f} s, chunk "
              f"{stats['chunk_tokens']}, {stats['prefill_steps']} steps")  # fmt: skip
        assert choice["usage"]["total_tokens"] == count + 3
        assert live.http.get("/health").status_code == 200
