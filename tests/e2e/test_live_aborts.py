"""200 clients that leave at random moments, and the moments that are awkward.

What must hold afterwards: no page is held, nothing runs or waits, the idle check is clean, and the
same prompt reads the same as before.
Mutants tried: pages kept on abort, an abort that leaves its request in the queue, a front that
never tells the engine.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter

import httpx
import pytest

from tests.support.live import Json, Live, Stream, greedy, until

PROMPT = "Once upon a time"
NUM_CLIENTS = 200
AT_ONCE = 6
CHUNK = 128


def random_body(rng: random.Random) -> Json:
    """Short prompts and ones of several chunks, stream and not, one and several choices."""
    length = rng.choice((3, 3, 20, 100, 129, 400))
    body = greedy(rng.choices(range(3, 490), k=length), rng.choice((1, 4, 10, 300)))
    return body | {"stream": rng.random() < 0.5, "n": rng.choice((1, 1, 1, 2)),
                   "temperature": rng.choice((0, 1))}  # fmt: skip


async def leave_after(client: httpx.AsyncClient, body: Json, patience_s: float) -> str:
    """One client; what became of it."""
    try:
        async with asyncio.timeout(patience_s):
            if not body["stream"]:
                answer = await client.post("/v1/completions", json=body)
                return str(answer.status_code)
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass
                return str(answer.status_code)
    except TimeoutError:
        return "left streaming" if body["stream"] else "left waiting"


async def many_leave(url: str, rng: random.Random) -> Counter[str]:
    gate = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def one(body: Json, patience_s: float) -> str:
            async with gate:
                return await leave_after(client, body, patience_s)

        jobs = [one(random_body(rng), rng.uniform(0.005, 0.5)) for _ in range(NUM_CLIENTS)]
        return Counter(await asyncio.gather(*jobs))


def test_p05_p06_two_hundred_clients_leave(server: Live) -> None:
    before = server.complete(PROMPT, 20, logprobs=0)
    aborted, since = server.stats()["aborted"], server.next_step()
    log_at = len(server.log())
    ends = asyncio.run(many_leave(server.url, random.Random(483)))
    stats = server.wait_idle()
    steps = server.steps(since)
    print(f"\nends {dict(ends)}, engine aborts {stats['aborted'] - aborted}, steps {len(steps)}")
    assert sum(ends.values()) == NUM_CLIENTS
    assert set(ends) <= {"200", "left streaming", "left waiting"}, ends
    assert min(ends["left streaming"], ends["left waiting"]) >= 30, ends
    assert ends["200"] >= 1, ends
    # a client may leave in the moment before it is submitted, or after its end
    assert 0 < stats["aborted"] - aborted <= 2 * NUM_CLIENTS
    log = server.log()[log_at:]
    assert "Traceback" not in log
    assert " error " not in log
    after = server.complete(PROMPT, 20, logprobs=0)
    assert (after["text"], after["logprobs"]) == (before["text"], before["logprobs"])
    assert server.http.get("/health").status_code == 200


def leave(server: Live, body: Json, *, when_step: int, kind: str) -> int:
    """Send, close the connection once `when_step` steps of a kind have run; the steps after."""
    since = server.next_step()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        request = client.build_request("POST", "/v1/completions", json=body)
        stream = _Sender(client, request)
        until(lambda: len(_of(server.steps(since), kind)) >= when_step, 30, "no steps")
        stream.close()
    left = server.next_step()
    if not when_step:  # it may still be on its way in: idle means something once one behind it ran
        server.complete("behind it", 1)
    server.wait_idle()
    return server.next_step() - left


def _of(steps: list[Json], kind: str) -> list[Json]:
    return [step for step in steps if step["kind"] == kind]


class _Sender:
    """Sends a request over a bare socket, so that it can be closed at any moment."""

    def __init__(self, client: httpx.Client, request: httpx.Request) -> None:
        assert request.url.port is not None
        self._socket = socket.create_connection((request.url.host, request.url.port))
        lines = [f"POST {request.url.path} HTTP/1.1", *(f"{k}: {v}" for k, v in
                                                       request.headers.items())]  # fmt: skip
        self._socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + request.read())

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("kind", "when_step"),
    [("prefill", 0), ("prefill", 1), ("prefill", 6), ("prefill", 7), ("decode", 3)],
)
def test_p06_leaving_in_any_phase_frees_within_a_step(
    server: Live, streamed: bool, kind: str, when_step: int
) -> None:
    """At arrival, in the first, a middle and the last chunk of seven, and while decoding."""
    ids = random.Random(2 * (when_step + 1) + streamed).choices(range(3, 490), k=6 * CHUNK + 50)
    body = greedy(ids, 2000) | {"stream": streamed}
    steps_after = leave(server, body, when_step=when_step, kind=kind)
    assert steps_after <= 4, steps_after  # of 2000: what ran until the closing was noticed


def test_p06_leaving_right_at_the_end(server: Live) -> None:
    """Aborts that cross the last token on their way."""
    for _ in range(10):
        stream_ends = Stream(server, greedy(PROMPT, 3))
        leave(server, greedy(PROMPT, 3), when_step=2, kind="decode")
        assert stream_ends.join().choices[-1]["finish_reason"] == "length"
    server.wait_idle()


def test_h09_an_abort_while_waiting_leaves_the_queue(server: Live) -> None:
    """All rows are taken; the one that waits leaves, those that run go on."""
    running = [Stream(server, greedy(f"{PROMPT} {i}", 100)) for i in range(4)]
    for stream in running:
        stream.wait_events(2)
    waiting = Stream(server, greedy("I wait", 10))
    until(lambda: server.stats()["num_waiting"] == 1, 10, "nobody waits")
    gone = greedy("I leave", 10)
    log_at = len(server.log())
    with httpx.Client(base_url=server.url) as client:
        sender = _Sender(client, client.build_request("POST", "/v1/completions", json=gone))
        until(lambda: server.stats()["num_waiting"] == 2, 10, "the second does not wait")
        sender.close()
    until(lambda: server.stats()["num_waiting"] == 1, 5, "the queue keeps who left")
    server.wait_log(r"request aborted request_id=\S+ prompt_tokens=\d+ tokens=0", after=log_at)
    for stream in (*running, waiting):
        assert stream.join().choices[-1]["finish_reason"] == "length"
    server.wait_idle()
