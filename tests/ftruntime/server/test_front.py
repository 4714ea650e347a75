"""The whole front over the real bridge, process, loop and scheduler; the executor is a formula.

Mutants tried: `settle` that cancels nothing (pages stay), engine ids not unique, readiness not
asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn

from ftruntime.server.app import create_app
from ftruntime.server.bridge import Bridge
from ftruntime.server.serve import claim_port
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer
from tests.ftruntime.engine.fake_engine import FAIL, expected_tokens
from tests.ftruntime.server.fake_engine import settings

ROOT = Path(__file__).parents[3]
TEXT = "/v1/completions"


@dataclass
class Stand:
    http: httpx.AsyncClient
    bridge: Bridge
    tokenizer: Tokenizer

    async def stats(self) -> dict[str, object]:
        return (await self.http.get("/v1/stats")).json()

    async def ready(self) -> None:
        while (await self.http.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)

    async def all_free(self) -> dict[str, object]:
        """Wait until nothing runs; the stats then."""
        stats = await self.stats()
        while stats["num_running"] or stats["num_waiting"] or stats["used_pages"]:
            await asyncio.sleep(0.02)
            stats = await self.stats()
        return stats


@pytest.fixture
def stand(tokenizer: Tokenizer, chat: ChatFormat) -> Callable[..., None]:
    """Runs `work(stand)` against a server whose engine is built with the given config."""

    @asynccontextmanager
    async def up(config: dict[str, object]) -> AsyncIterator[Stand]:
        bridge = Bridge(
            config, builder="tests.ftruntime.engine.fake_engine:build",
            env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        app = create_app(bridge, tokenizer, chat, settings())
        listener = claim_port("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        server.capture_signals = _no_signals  # type: ignore[method-assign]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            yield Stand(http, bridge, tokenizer)
        server.should_exit = True
        await task

    def run(work: Callable[[Stand], Awaitable[None]], **config: object) -> None:
        async def main() -> None:
            async with up(config) as made:
                await asyncio.wait_for(work(made), 25)

        asyncio.run(main())

    return run


class _no_signals:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_h21_the_first_200_of_health_serves(stand: Callable[..., None]) -> None:
    async def work(site: Stand) -> None:
        phases = set()
        while (response := await site.http.get("/health")).status_code == 503:
            phases.add(response.json()["phase"])
            assert (await site.http.get("/v1/models")).status_code == 503
            await asyncio.sleep(0.02)
        assert "weights" in phases
        prompt = [5, 6, 7]
        answer = await site.http.post(TEXT, json={"prompt": prompt, "max_tokens": 20})
        expected = site.tokenizer.decode(expected_tokens(prompt, 20))
        assert answer.json()["choices"][0]["text"] == expected
        assert answer.json()["usage"]["completion_tokens"] == 20

    stand(work, load_s=0.3)


def test_h09_two_hundred_random_aborts_leave_every_page_free(stand: Callable[..., None]) -> None:
    async def work(site: Stand) -> None:
        await site.ready()
        chance = random.Random(3)

        async def one() -> None:
            prompt = [chance.randrange(500) for _ in range(chance.randrange(1, 400))]
            body = {"prompt": prompt, "max_tokens": 400, "n": chance.choice((1, 1, 2))}
            leave_after = chance.random() * 0.03
            try:
                async with asyncio.timeout(leave_after):
                    if chance.random() < 0.5:
                        await site.http.post(TEXT, json=body)
                    else:
                        stream = site.http.stream("POST", TEXT, json={**body, "stream": True})
                        async with stream as response:
                            async for _ in response.aiter_bytes():
                                pass
            except TimeoutError:
                pass

        for _ in range(20):
            await asyncio.gather(*(one() for _ in range(10)))
        stats = await site.all_free()
        assert stats["integrity"] == "ok"
        assert isinstance(stats["aborted"], int)
        assert stats["aborted"] > 20
        prompt = [9, 8, 7]
        answer = await site.http.post(TEXT, json={"prompt": prompt, "max_tokens": 9})
        assert answer.json()["choices"][0]["text"] == site.tokenizer.decode(
            expected_tokens(prompt, 9)
        )

    stand(work, step_s=0.0005)


def test_g11_a_burst_is_refused_in_part_and_nothing_is_lost(stand: Callable[..., None]) -> None:
    async def work(site: Stand) -> None:
        await site.ready()
        body = {"prompt": [5] * 300, "max_tokens": 50}
        answers = await asyncio.gather(*(site.http.post(TEXT, json=body) for _ in range(30)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == 50
            else:
                assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (await site.all_free())["integrity"] == "ok"

    stand(work, max_waiting=6, running=2, step_s=0.001)


def test_a_failing_step_is_a_500_and_the_server_goes_on(stand: Callable[..., None]) -> None:
    async def work(site: Stand) -> None:
        await site.ready()
        bad = await site.http.post(TEXT, json={"prompt": [5, FAIL], "max_tokens": 5})
        assert bad.status_code == 500
        assert "the accelerator is on fire" in bad.json()["error"]["message"]
        good = await site.http.post(TEXT, json={"prompt": [5, 6], "max_tokens": 5})
        assert good.status_code == 200
        steps = (await site.http.get("/v1/steps?since=0")).json()
        assert steps["next"] >= 5
        assert {"index", "kind", "num_tokens", "start_s"} <= set(steps["steps"][0])
        text = (await site.http.get("/metrics")).text
        assert 'ftruntime_requests_total{outcome="error"} 1.0' in text
        assert "ftruntime_decode_steps_total" in text

    stand(work)


def test_a_stop_string_frees_the_row_without_an_abort(stand: Callable[..., None]) -> None:
    async def work(site: Stand) -> None:
        await site.ready()
        prompt = [5, 6, 7]
        whole = site.tokenizer.decode(expected_tokens(prompt, 60))
        stop = whole[8:10]
        body = {"prompt": prompt, "max_tokens": 4000, "stop": stop}
        answer = (await site.http.post(TEXT, json=body)).json()["choices"][0]
        assert answer["text"] == whole[: whole.index(stop)]
        assert answer["finish_reason"] == "stop"
        assert (await site.all_free())["aborted"] == 0

    stand(work, step_s=0.0005)


def test_engine_death_turns_everything_to_503(stand: Callable[..., None]) -> None:
    async def work(site: Stand) -> None:
        await site.ready()
        body = {"prompt": [5], "max_tokens": 4000, "stream": True}
        text = ""
        async with site.http.stream("POST", TEXT, json=body) as response:
            async for piece in response.aiter_text():
                if not text:
                    os.kill(site.bridge.pid or 0, signal.SIGKILL)
                text += piece
        blocks = text.split("\n\n")
        assert blocks[-2] == "data: [DONE]"
        assert json.loads(blocks[-3][6:])["error"]["code"] == "engine_dead"
        health = await site.http.get("/health")
        assert (health.status_code, health.json()["phase"]) == (503, "dead")
        for path in ("/v1/models", "/v1/stats"):
            assert (await site.http.get(path)).status_code == 503
        assert (await site.http.post(TEXT, json={"prompt": [5]})).status_code == 503

    stand(work, step_s=0.001)


def test_one_request_id_used_twice_at_once(stand: Callable[..., None]) -> None:
    async def work(site: Stand) -> None:
        await site.ready()
        body = {"prompt": [5, 6], "max_tokens": 40, "n": 2}
        headers = {"X-Request-Id": "same"}
        posts = (site.http.post(TEXT, json=body, headers=headers) for _ in range(3))
        answers = await asyncio.gather(*posts)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert {answer.headers["x-request-id"] for answer in answers} == {"same"}

    stand(work, step_s=0.001)
