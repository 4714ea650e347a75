"""The bridge over a real engine process whose executor is a formula.

Mutants that these tests catch: no Cancel for a closed reader; an abort after the end; a stop string
counted as abort; no bound for a slow reader; late events raising; a cancelled id free at once;
readers or questions not told of the engine's death; waiting work or a silent engine taken for
health; thread variables not set; a process left by stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from ftruntime.engine import messages
from ftruntime.server import bridge as bridge_module
from ftruntime.server.bridge import Bridge, EngineDeadError
from ftruntime.types import RequestRejectedError, SamplingParams, TokenEvent
from tests.ftruntime.engine.fake_engine import FAIL, SLEEP, VOCAB, expected_tokens

ROOT = Path(__file__).parents[3]
ENV = {"PYTHONPATH": str(ROOT)}
BUILDER = "tests.ftruntime.engine.fake_engine:build"

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def running(
    stall_timeout_s: float = 60.0, *, end_stalled: bool = False, **config: object
) -> AsyncIterator[Bridge]:
    bridge = Bridge(
        config, builder=BUILDER, stall_timeout_s=stall_timeout_s, end_stalled=end_stalled, env=ENV
    )
    await bridge.start()
    try:
        await asyncio.wait_for(bridge.wait_ready(), 20.0)
        yield bridge
    finally:
        await bridge.stop(0.5)


def params(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def stream(
    bridge: Bridge, name: str, prompt: list[int], max_tokens: int | None
) -> AsyncGenerator[TokenEvent, None]:
    generator = bridge.generate(name, prompt, params(max_tokens))
    return cast("AsyncGenerator[TokenEvent, None]", generator)


async def tokens(bridge: Bridge, name: str, prompt: list[int], max_tokens: int) -> list[int | None]:
    return [event.token_id async for event in stream(bridge, name, prompt, max_tokens)]


async def eventually(check: Callable[[], Awaitable[bool]], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not await check():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


async def no_page_used(bridge: Bridge) -> bool:
    stats = await bridge.stats()
    assert stats["integrity"] == "ok"
    return stats["used_pages"] == 0 and stats["num_running"] == 0 and stats["num_waiting"] == 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_requests_run_together_and_give_their_own_tokens() -> None:
    async with running() as bridge:
        prompts = {f"r{i}": [i + 1] * (60 * i + 1) for i in range(8)}
        got = await asyncio.gather(*(tokens(bridge, n, p, 12) for n, p in prompts.items()))
        assert got == [expected_tokens(p, 12) for p in prompts.values()]
        stats, steps = await bridge.stats(), await bridge.steps(3)
        assert stats["prefill_steps"] > 0
        assert stats["experts"] == {"num_slots": 3}
        assert cast("list[dict[str, int]]", steps["steps"])[0]["index"] == 3
        assert bridge.num_aborted == 0


async def test_health_follows_the_load() -> None:
    bridge = Bridge({"load_s": 0.3}, builder=BUILDER, env=ENV)
    await bridge.start()
    health = bridge.health()
    assert (health.ready, health.phase, health.progress) == (False, "starting", 0.0)
    with pytest.raises(RequestRejectedError, match="still being loaded") as caught:
        await tokens(bridge, "early", [1], 1)
    assert caught.value.status == 503
    await eventually(lambda: _is(bridge.health().phase == "weights"), 20.0)
    assert bridge.health().progress == 0.5
    info = await bridge.wait_ready()
    assert info["vocab_size"] == VOCAB + 3
    assert bridge.info == info
    assert bridge.health().ready
    await bridge.stop(2.0)
    assert not bridge.health().ready


async def test_a_failed_start_is_one_sentence() -> None:
    bridge = Bridge({"error": "--kv-format is fp3"}, builder=BUILDER, env=ENV)
    await bridge.start()
    with pytest.raises(EngineDeadError, match=r"^--kv-format is fp3$"):
        await asyncio.wait_for(bridge.wait_ready(), 20.0)
    assert bridge.health().phase == "dead"
    assert bridge.health().detail == "--kv-format is fp3"
    await bridge.stop(2.0)


async def test_rejections_come_before_any_event() -> None:
    async with running(num_tokens=1024) as bridge:
        for prompt, max_tokens, text, code in (
            ([], 1, "prompt is empty", "invalid_value"),
            ([VOCAB + 3], 1, r"token id 503, expected ids in \[0, 503\)", "invalid_value"),
            ([-1], 1, "token id -1", "invalid_value"),
            ([1] * 1000, 25, "needs 1025 tokens .* 1024", "context_length_exceeded"),
            ([1] * 1024, None, "needs 1025 tokens .* 1024", "context_length_exceeded"),
        ):
            with pytest.raises(RequestRejectedError, match=text) as caught:
                await anext(stream(bridge, "x", prompt, max_tokens))
            assert (caught.value.code, caught.value.status) == (code, 400)
        assert len(await tokens(bridge, "fits", [1] * 1000, 24)) == 24
        events = [e async for e in stream(bridge, "open", [1] * 1000, None)]
        assert (len(events), events[-1].finish_reason) == (24, "length")


async def test_a_full_queue_is_a_429() -> None:
    async with running(running=1, max_waiting=1, step_s=0.01) as bridge:
        streams = [stream(bridge, str(i), [1], 500) for i in range(4)]
        results = await asyncio.gather(
            *(asyncio.wait_for(anext(s), 0.5) for s in streams), return_exceptions=True
        )
        rejected = [r for r in results if isinstance(r, RequestRejectedError)]
        assert rejected
        assert {(r.code, r.status) for r in rejected} == {("queue_full", 429)}


async def test_a_running_id_is_refused() -> None:
    async with running(step_s=0.005) as bridge:
        first = stream(bridge, "same", [1], 50)
        await anext(first)
        with pytest.raises(RequestRejectedError, match="request id is 'same'"):
            await anext(stream(bridge, "same", [1], 1))
        await first.aclose()
        # the old one's last event is still on its way
        with pytest.raises(RequestRejectedError, match="request id is 'same'"):
            await anext(stream(bridge, "same", [1], 1))
        await eventually(lambda: no_page_used(bridge))
        assert len(await tokens(bridge, "same", [1], 3)) == 3


async def test_h09_a_closed_stream_is_aborted_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(step_s=0.002) as bridge:
        events = stream(bridge, "gone", [1] * 200, 5000)
        for _ in range(5):
            await anext(events)
        await events.aclose()
        await eventually(lambda: no_page_used(bridge))
        assert bridge.num_aborted == 1
        assert (await bridge.stats())["aborted"] == 1
        lines = [r.getMessage() for r in caplog.records if "aborted" in r.getMessage()]
        assert len(lines) == 1
        assert lines[0].startswith("request aborted request_id=gone tokens=")
        assert int(lines[0].split("tokens=")[1].split()[0]) >= 5


async def test_a_cancelled_reader_aborts_its_request() -> None:
    async with running(step_s=0.002) as bridge:
        task = asyncio.create_task(tokens(bridge, "task", [1], 5000))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bridge.num_aborted == 1
        await eventually(lambda: no_page_used(bridge))


async def test_finish_ends_a_request_without_an_abort() -> None:
    async with running(step_s=0.002) as bridge:
        events = stream(bridge, "done", [1], 5000)
        await anext(events)
        bridge.finish("done")
        last = [event async for event in events][-1]
        assert (last.token_id, last.finish_reason) == (None, "stop")
        bridge.finish("unknown")
        await eventually(lambda: no_page_used(bridge))
        assert (bridge.num_aborted, (await bridge.stats())["aborted"]) == (0, 0)


async def test_p05_p06_200_random_aborts_free_every_page() -> None:
    rng = random.Random(5)

    async def one(bridge: Bridge, number: int) -> None:
        prompt = [number + 1] * rng.choice((1, 100, 128, 300, 700))
        events = stream(bridge, f"r{number}", prompt, rng.choice((1, 5, 40)))
        kind, after = rng.choice(("tokens", "time")), rng.randrange(6)
        if kind == "time":
            task = asyncio.create_task(_drain(events))
            await asyncio.sleep(after * 0.002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            for _ in range(after):
                if await anext(events, None) is None:
                    break
        await events.aclose()

    async with running(step_s=0.0005, interleave=2, max_waiting=300) as bridge:
        pages = (await bridge.stats())["total_pages"]
        for start in range(0, 200, 40):
            await asyncio.gather(*(one(bridge, n) for n in range(start, start + 40)))
        await eventually(lambda: no_page_used(bridge), 10.0)
        stats = await bridge.stats()
        assert stats["used_window_pages"] == 0
        assert stats["total_pages"] == pages
        assert bridge.num_aborted > 50
        assert await tokens(bridge, "after", [9, 9], 20) == expected_tokens([9, 9], 20)


async def test_a_reader_that_stops_reading_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_module, "QUEUE_EVENTS", 20)
    async with running() as bridge:
        slow = stream(bridge, "slow", [1], 5000)
        await anext(slow)
        await eventually(lambda: _is(bridge.num_aborted == 1))
        rest = [event async for event in slow]
        assert [e.token_id for e in rest[:-1]] == expected_tokens([1], len(rest))[1:]
        assert len(rest) in (
            20,
            21,
        )  # the first token may have been read before or after the 20th came
        assert (rest[-1].finish_reason, rest[-1].token_id) == ("abort", None)
        assert "20 events unread" in str(rest[-1].error)
        await eventually(lambda: no_page_used(bridge))
        assert bridge.num_aborted == 1


async def test_k10_a_failing_step_fails_its_request_only() -> None:
    async with running(step_s=0.002) as bridge:
        good = asyncio.create_task(tokens(bridge, "good", [4, 5], 50))
        await asyncio.sleep(0.05)
        events = [e async for e in stream(bridge, "bad", [1, FAIL], 5)]
        assert [e.finish_reason for e in events] == ["error"]
        assert "ArithmeticError: the accelerator is on fire" in str(events[0].error)
        assert await good == expected_tokens([4, 5], 50)
        assert bridge.health().ready
        assert await no_page_used(bridge)


async def test_s12_a_stuck_step_turns_health_false() -> None:
    async with running(stall_timeout_s=0.4) as bridge:
        assert bridge.health().ready
        stuck = asyncio.create_task(anext(stream(bridge, "stuck", [SLEEP], 5)))
        start = time.monotonic()
        await eventually(lambda: _is(not bridge.health().ready), 5.0)
        assert 0.3 < time.monotonic() - start < 0.8
        assert bridge.health().phase == "stalled"
        assert "a step has been running for" in bridge.health().detail
        assert (await bridge.stats())["num_running"] == 1
        stuck.cancel()


async def test_s12_an_engine_that_does_not_answer_turns_health_false() -> None:
    async with running(stall_timeout_s=0.3) as bridge:
        os.kill(cast("int", bridge.pid), signal.SIGSTOP)
        await eventually(lambda: _is(not bridge.health().ready), 5.0)
        assert "not answered" in bridge.health().detail
        os.kill(cast("int", bridge.pid), signal.SIGCONT)
        await eventually(lambda: _is(bridge.health().ready), 5.0)


@pytest.mark.parametrize("stopped", [True, False])
async def test_an_engine_of_several_ranks_that_does_not_move_ends(
    stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that does not return, or a process that does not: the others wait for it."""
    monkeypatch.setattr(bridge_module, "_DIAGNOSIS_S", 0.3)
    async with running(stall_timeout_s=0.3, end_stalled=True) as bridge:
        assert await tokens(bridge, "a", [1], 2)
        await asyncio.sleep(0.8)
        assert bridge.health().ready, "idle is no stall"
        pid = cast("int", bridge.pid)
        waiting = asyncio.create_task(anext(stream(bridge, "stuck", [SLEEP], 5)))
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        what = "has not answered" if stopped else "a step has been running"
        with pytest.raises(EngineDeadError, match=rf"{what}.*, more than 0.3 s: the ranks are end"):
            await asyncio.wait_for(waiting, 5.0)
        await eventually(lambda: _is(not alive(pid)), 5.0)
        assert bridge.health().phase == "dead"
        assert what in await asyncio.wait_for(bridge.wait_end(), 1.0)


async def test_s12_waiting_work_without_a_step_turns_health_false() -> None:
    bridge = Bridge({}, stall_timeout_s=2.0)
    bridge.info = {}
    bridge._last_stats = {"running_step_s": 0.0, "waiting_without_step_s": 2.5}
    assert bridge.health().detail == (
        "requests have been waiting without a step for 2.5 s, more than 2 s"
    )
    bridge._last_stats = {"running_step_s": 1.9, "waiting_without_step_s": 1.9}
    assert bridge.health().ready


async def test_an_idle_engine_stays_healthy_beyond_the_stall_timeout() -> None:
    async with running(stall_timeout_s=0.3) as bridge:
        await tokens(bridge, "a", [1], 2)
        await asyncio.sleep(0.6)
        assert bridge.health().ready


async def test_a_killed_engine_fails_everyone() -> None:
    async with running(step_s=0.002) as bridge:
        running_stream = stream(bridge, "running", [1], 5000)
        await anext(running_stream)
        os.kill(cast("int", bridge.pid), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="ended with exit code -9"):
            async for _ in running_stream:
                pass
        with pytest.raises(EngineDeadError):
            await anext(stream(bridge, "next", [1], 1))
        with pytest.raises(EngineDeadError):
            await bridge.stats()
        health = bridge.health()
        assert (health.ready, health.phase) == (False, "dead")
        assert "exit code -9" in health.detail
        assert bridge.num_aborted == 0


async def test_a_question_ends_with_the_engine() -> None:
    async with running() as bridge:
        # a message without an answer stands for the question that comes too late
        question = asyncio.create_task(bridge._link.ask(lambda _: messages.Cancel("none"), None))
        await asyncio.sleep(0.05)
        os.kill(cast("int", bridge.pid), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="ended with exit code -9"):
            await asyncio.wait_for(question, 3.0)


async def test_stop_leaves_no_process_even_when_a_step_is_stuck() -> None:
    async with running() as bridge:
        pid = cast("int", bridge.pid)
        waiting = asyncio.create_task(anext(stream(bridge, "stuck", [SLEEP], 5)))
        await asyncio.sleep(0.2)
        await bridge.stop(0.2)
        assert not alive(pid)
        with pytest.raises(EngineDeadError, match="the engine was stopped"):
            await waiting


async def test_stop_before_start_and_twice() -> None:
    bridge = Bridge({}, builder=BUILDER, env=ENV)
    await bridge.stop(0.1)
    await bridge.start()
    with pytest.raises(RuntimeError, match="started already"):
        await bridge.start()
    pid = cast("int", bridge.pid)
    await bridge.stop(0.0)
    await bridge.stop(0.0)
    assert not alive(pid)


async def test_the_engine_runs_its_maths_on_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    async with running(trace=str(tmp_path / "trace")) as bridge:
        assert (tmp_path / "trace").read_text() == f"{bridge.pid} 1"


def test_killing_the_front_ends_the_engine(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        from ftruntime.server.bridge import Bridge
        from ftruntime.types import SamplingParams

        async def main():
            config = {{"step_s": 0.002, "trace": {str(tmp_path / "trace")!r}}}
            bridge = Bridge(config, builder={BUILDER!r})
            await bridge.start()
            await bridge.wait_ready()
            async for event in bridge.generate("a", [1], SamplingParams(max_tokens=8000)):
                print("token", flush=True)

        asyncio.run(main())
    """)
    front = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **ENV}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert front.stdout is not None
    assert front.stdout.readline() == "token\n"
    engine = int((tmp_path / "trace").read_text().split()[0])
    assert alive(engine)
    front.kill()
    deadline = time.monotonic() + 2.0
    while alive(engine) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(engine)
    _, errors = front.communicate()
    assert "Traceback" not in errors


def test_the_bridge_needs_no_torch() -> None:
    program = "import sys, ftruntime.server.bridge; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env={**os.environ, **ENV})


def test_bad_stall_timeout() -> None:
    with pytest.raises(ValueError, match="stall_timeout_s is 0, expected a number > 0"):
        Bridge({}, stall_timeout_s=0)


async def _drain(events: AsyncGenerator[TokenEvent, None]) -> None:
    async for _ in events:
        pass


async def _is(value: bool) -> bool:
    return value
