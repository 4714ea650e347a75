"""A server's life: start, two beside each other, signals, dead halves, a failing and a stuck step.

Mutants tried: `/health` 200 while loading, a drain that aborts the running stream, an engine that
outlives its front, a front that ends with its engine, a failed step that fails every request, a
health that does not know the present step.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.failing_server import FAIL_IDS, FAIL_LATER_IDS, STALL_IDS, STALL_S
from tests.support.live import MODEL, Launcher, Live, Stream, free_port, greedy, is_alive, until

PROMPT = "Once upon a time"
FLAGS = ("--num-tokens", "2048")


def test_h21_g08_ready_means_ready_and_sigterm_drains(launcher: Launcher) -> None:
    live = launcher.spawn(*FLAGS)
    live.wait_ready()
    assert live.complete(PROMPT, 2)["finish_reason"] == "length"  # at once, before anything else
    codes = [code for code, _ in live.health_seen]
    assert codes == [503] * (len(codes) - 1) + [200]
    bodies = [body for _, body in live.health_seen]
    phases = list(dict.fromkeys(body["phase"] for body in bodies))
    assert phases[0] == "starting"
    assert phases[-1] == "ready"
    assert all(0 <= body["progress"] <= 1 for body in bodies)
    (engine,) = live.engine_pids()

    stream = Stream(live, greedy(PROMPT, 100))
    stream.wait_events(3)
    live.process.send_signal(signal.SIGTERM)
    until(lambda: live.http.get("/health").status_code == 503, 5, "health does not turn")
    assert live.http.get("/health").json()["phase"] == "draining"
    refused = live.post("/v1/completions", greedy(PROMPT, 1))
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert live.process.poll() is None
    stream.join()
    assert stream.done
    assert stream.failure is None
    assert len(stream.events) > 3
    assert stream.choices[-1]["finish_reason"] == "length"
    start_s = time.monotonic()
    assert live.process.wait(20) == 0
    print(f"\nphases {phases}; exit {time.monotonic() - start_s:.2f} s after the stream's end")
    assert not is_alive(engine)
    assert "Traceback" not in live.log()


def test_g08_without_a_model_the_demo_is_served_and_a_second_signal_aborts(
    launcher: Launcher,
) -> None:
    live = launcher.spawn(*FLAGS, with_model=False)
    live.wait_ready()
    answer = live.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "What is written of Moses?"}], "model": MODEL,
         "temperature": 0, "max_tokens": 500},
    )  # fmt: skip
    (choice,) = answer.json()["choices"]
    # the trained one: it ends by itself, in words
    assert choice["finish_reason"] == "stop"
    assert len(re.findall(r"\b(?:and|the|of|unto|him|that)\b", choice["message"]["content"])) >= 3
    stream = Stream(live, greedy(PROMPT, 1900))
    stream.wait_events(3)
    live.process.send_signal(signal.SIGTERM)
    live.wait_log("shutdown begins")
    assert live.process.poll() is None
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(20) == 0
    stream.join()
    assert stream.errors[0]["code"] == "shutting_down"
    assert stream.done


def test_g06_g07_two_servers_and_their_deaths(launcher: Launcher) -> None:
    """Neighbouring ports; then one loses its engine, the other its front."""
    port = free_port()
    one = launcher.spawn(*FLAGS, port=port)
    two = launcher.spawn(*FLAGS, port=free_port(after=port))
    try:
        for live in (one, two):
            live.wait_ready()
        assert one.complete(PROMPT, 12)["text"] == two.complete(PROMPT, 12)["text"]
        lose_engine(one)
        assert two.complete(PROMPT, 2)["finish_reason"] == "length"
        lose_front(two)
    finally:
        one.stop()
        two.stop()


def lose_engine(live: Live) -> None:
    (engine,) = live.engine_pids()
    stream = Stream(live, greedy(PROMPT, 1500))
    stream.wait_events(3)
    os.kill(engine, signal.SIGKILL)
    stream.join(10)
    assert stream.errors[0]["code"] == "engine_dead"
    assert stream.done
    assert live.process.wait(10) == 1, "the server ends with its engine"
    assert live.log().strip().endswith("the engine process ended with exit code -9")
    assert "Traceback" not in live.log()


def lose_front(live: Live) -> None:
    """While nothing runs, so that the engine has nothing to send and no error to notice."""
    (engine,) = live.engine_pids()
    live.wait_idle()
    start_s = time.monotonic()
    live.process.kill()
    until(lambda: not is_alive(engine), 10, "the engine outlives its front")
    print(f"\nengine gone {time.monotonic() - start_s:.2f} s after its front")
    live.process.wait(5)
    assert "Traceback" not in live.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_g07_a_signal_during_the_load_leaves_no_process(
    launcher: Launcher, number: signal.Signals
) -> None:
    live = launcher.spawn(*FLAGS)
    until(lambda: bool(live.engine_pids()), 30, "no engine process")
    (engine,) = live.engine_pids()
    live.process.send_signal(number)
    until(lambda: live.process.poll() is not None, 10, "the front stays")
    until(lambda: not is_alive(engine), 10, "the engine stays")
    assert live.process.returncode == (-number if number == signal.SIGKILL else 0)
    assert "Traceback" not in live.log()


def test_g06_a_taken_port_is_one_sentence(launcher: Launcher, server: Live) -> None:
    live = launcher.spawn(port=server.port)
    start_s = time.monotonic()
    assert live.process.wait(30) == 1
    last = live.log().splitlines()[-1]
    print(f"\n{last} ({time.monotonic() - start_s:.1f} s)")
    assert last == f"--port is {server.port}, already in use on 127.0.0.1, expected a free port"
    assert "Traceback" not in live.log()
    assert server.http.get("/health").status_code == 200


@pytest.fixture(scope="module")
def failing(launcher: Launcher) -> Iterator[Live]:
    command = [sys.executable, "-m", "tests.support.failing_server"]
    flags = ("--numerics", "exact", "--num-tokens", "4096", "--stall-timeout-s", "1")
    with launcher.serving(*flags, command=command) as live:
        yield live


def test_k10_a_failing_prefill_fails_its_request_only(failing: Live) -> None:
    alone = failing.complete(PROMPT, 60)["text"]
    log_at = len(failing.log())
    stream = Stream(failing, greedy(PROMPT, 60))
    stream.wait_events(5)
    for _ in range(2):
        answer = failing.post("/v1/completions", greedy([5, 6, *FAIL_IDS], 5))
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "engine_error"
        assert "ZeroDivisionError: a test asked for it" in error["message"]
        assert failing.http.get("/health").status_code == 200
    assert stream.join().text == alone
    assert not stream.errors
    dump = failing.log()[log_at:]
    assert dump.count("failed step index=") == 2
    assert "kind=prefill tokens=5" in dump
    assert dump.count("step history") >= 2
    failing.wait_idle()


def test_k10_a_failing_chunk_of_a_long_prompt_frees_its_pages(failing: Live) -> None:
    since = failing.next_step()
    ids = [*([9, 10, 11] * 300), *FAIL_IDS]
    answer = failing.post("/v1/completions", greedy(ids, 5))
    assert answer.status_code == 500
    assert [step["num_tokens"] for step in failing.steps(since)] == [384, 384, 135]
    failing.wait_idle()
    assert failing.complete(PROMPT, 2)["finish_reason"] == "length"


def test_k10_a_failing_decode_ends_the_batch_and_the_server_goes_on(failing: Live) -> None:
    neighbour = Stream(failing, greedy(PROMPT, 400))
    neighbour.wait_events(5)
    doomed = Stream(failing, greedy([7, *FAIL_LATER_IDS], 50)).join()
    # it had a token before: the error is an event of the stream
    assert doomed.status == 200
    assert "a test asked for it later" in doomed.errors[0]["message"]
    assert doomed.done
    assert len(doomed.choices) == 1
    assert "a test asked for it later" in neighbour.join().errors[0]["message"]
    failing.wait_idle()
    assert failing.complete(PROMPT, 3)["finish_reason"] == "length"


def test_s12_a_stuck_step_turns_health_to_503_and_back(failing: Live) -> None:
    """A step of three seconds where one second is allowed."""
    assert failing.http.get("/health").status_code == 200
    stream = Stream(failing, greedy([8, *STALL_IDS], 2))
    start_s = time.monotonic()
    until(lambda: failing.http.get("/health").status_code == 503, 2.0, "health stays 200")
    health = failing.http.get("/health").json()
    print(f"\n503 after {time.monotonic() - start_s:.2f} s: {health['detail']}")
    assert health["phase"] == "stalled"
    assert failing.stats()["num_running"] == 1  # questions are answered meanwhile
    assert stream.join(STALL_S + 10).choices[-1]["finish_reason"] == "length"
    until(lambda: failing.http.get("/health").status_code == 200, 3, "health stays 503")
    failing.wait_idle()


def test_s15_one_that_does_not_read_blocks_nobody(server: Live) -> None:
    """An unread stream goes on behind its buffers, others are answered meanwhile."""
    body = greedy(PROMPT, 300) | {"stream": True}
    with httpx.Client(base_url=server.url).stream("POST", "/v1/completions", json=body):
        until(lambda: server.stats()["num_running"] == 1, 10, "it does not run")
        assert server.complete("And then", 5)["finish_reason"] == "length"
    server.wait_idle()
