"""Streams and their ends: keep-alive, disconnects, time limits, interruption.

Mutants tried: settle missing on disconnect, keep-alive as data, no [DONE] after an error, the pump
not cancelled, the limit checked only between tokens, a late refusal swallowed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI

from ftruntime.types import RequestRejectedError
from tests.ftruntime.server.conftest import Site
from tests.ftruntime.server.fake_engine import FakeEngine

MakeSite = Callable[..., Site]
HI = [{"role": "user", "content": "Hi"}]
LONG = "one two three four five six seven eight nine ten " * 4


@dataclass
class Visitor:
    """One request as raw ASGI messages, whose client can leave."""

    app: FastAPI
    body: dict[str, Any]
    path: str = "/v1/chat/completions"
    status: int = 0
    data: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    _sent_body: bool = False

    def start(self) -> Visitor:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
            "http_version": "1.1", "scheme": "http", "path": self.path, "raw_path": b"",
            "query_string": b"", "root_path": "", "headers": [(b"x-request-id", b"visit")],
            "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.create_task(self.app(scope, self._receive, self._send))
        return self

    async def _receive(self) -> dict[str, Any]:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": json.dumps(self.body).encode()}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.data += message.get("body", b"")
        self.changed.set()
        await asyncio.sleep(0)

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not done():
                await asyncio.sleep(0.002)

    @property
    def blocks(self) -> list[str]:
        return self.data.decode().split("\n\n")[:-1]


def idle(engine: FakeEngine, app: FastAPI) -> bool:
    return not engine.running and not app.state.front.running


def outcome(app: FastAPI, name: str) -> float:
    value = app.state.front.metrics.registry.get_sample_value(
        "ftruntime_requests_total", {"outcome": name}
    )
    return float(value)


@pytest.mark.parametrize("stream", [True, False])
def test_h09_a_client_that_leaves_frees_its_sequences(
    make_site: MakeSite, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ftruntime.server")

    async def main() -> None:
        site = make_site(LONG, engine={"free_tokens": 5})
        site.engine.gate = asyncio.Event()
        visitor = Visitor(site.app, {"messages": HI, "stream": stream, "n": 2}).start()
        await visitor.until(lambda: len(site.engine.running) == 2)
        if stream:
            await visitor.until(lambda: len(visitor.blocks) >= 2 * 6)  # openings included
        await asyncio.sleep(0.02)
        visitor.gone.set()
        await visitor.until(lambda: idle(site.engine, site.app))
        assert [tokens for _, tokens in site.engine.aborted] == [5, 5]
        assert outcome(site.app, "aborted") == 1
        assert outcome(site.app, "ok") == 0
        await asyncio.wait_for(visitor.task, 5)

    asyncio.run(main())
    lines = [r.getMessage() for r in caplog.records if "aborted" in r.getMessage()]
    assert len(lines) == 1
    assert "request_id=visit.0" in lines[0]
    assert "tokens=10" in lines[0]
    assert "client disconnected" in lines[0]


def test_a_client_that_leaves_before_the_first_token(make_site: MakeSite) -> None:
    async def main() -> None:
        site = make_site(LONG, engine={"free_tokens": 0})
        site.engine.gate = asyncio.Event()
        visitor = Visitor(site.app, {"messages": HI, "stream": True}).start()
        await visitor.until(lambda: site.engine.running)
        visitor.gone.set()
        await visitor.until(lambda: idle(site.engine, site.app))
        assert site.engine.aborted == [("visit.0-0", 0)]

    asyncio.run(main())


def test_keep_alive_comments_while_prefill_runs(make_site: MakeSite) -> None:
    async def main() -> None:
        site = make_site("Hello.", keep_alive_s=0.02, engine={"free_tokens": 0})
        site.engine.gate = asyncio.Event()
        visitor = Visitor(site.app, {"messages": HI, "stream": True}).start()
        await visitor.until(lambda: len(visitor.blocks) >= 3)
        assert visitor.status == 200
        assert set(visitor.blocks) == {": keep-alive"}
        site.engine.gate.set()
        await asyncio.wait_for(visitor.task, 5)
        assert visitor.blocks[-1] == "data: [DONE]"
        data = [json.loads(b[6:]) for b in visitor.blocks[:-1] if not b.startswith(":")]
        text = "".join(d["choices"][0]["delta"].get("content", "") for d in data)
        assert text == "Hello."

    asyncio.run(main())


def test_a_late_refusal_is_an_event_then_done(make_site: MakeSite) -> None:
    async def main() -> None:
        site = make_site(keep_alive_s=0.02)

        async def refuse(*_: object) -> Any:
            await asyncio.sleep(0.1)
            raise RequestRejectedError("too late", code="queue_full", status=429)
            yield

        site.engine.generate = refuse  # type: ignore[method-assign]
        visitor = Visitor(site.app, {"messages": HI, "stream": True}).start()
        await asyncio.wait_for(visitor.task, 5)
        assert visitor.status == 200
        assert visitor.blocks[0] == ": keep-alive"
        assert json.loads(visitor.blocks[-2][6:])["error"]["message"] == "too late"
        assert visitor.blocks[-1] == "data: [DONE]"
        assert idle(site.engine, site.app)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_over_its_time_ends(make_site: MakeSite, stream: bool) -> None:
    async def main() -> None:
        site = make_site(LONG, request_timeout_s=0.1, engine={"free_tokens": 3})
        site.engine.gate = asyncio.Event()
        visitor = Visitor(site.app, {"messages": HI, "stream": stream}).start()
        started_s = time.monotonic()
        await asyncio.wait_for(visitor.task, 5)
        assert 0.1 <= time.monotonic() - started_s < 2
        if stream:
            error = json.loads(visitor.blocks[-2][6:])["error"]
            assert visitor.blocks[-1] == "data: [DONE]"
        else:
            assert visitor.status == 408
            error = json.loads(visitor.data)["error"]
        assert error["code"] == "request_timeout"
        assert "--request-timeout-s" in error["message"]
        assert "0.1 s" in error["message"]
        await visitor.until(lambda: idle(site.engine, site.app))
        assert site.engine.aborted == [("visit.0-0", 3)]
        assert outcome(site.app, "timeout") == 1

    asyncio.run(main())


def test_interrupting_all_ends_streams_with_an_event(make_site: MakeSite) -> None:
    async def main() -> None:
        site = make_site(LONG, engine={"free_tokens": 3})
        site.engine.gate = asyncio.Event()
        visitors = [
            Visitor(site.app, {"messages": HI, "stream": stream}).start()
            for stream in (True, False, True)
        ]
        await visitors[0].until(lambda: len(site.engine.running) == 3)
        await asyncio.sleep(0.02)
        site.app.state.front.abort_all("the server is going down")
        for visitor in visitors:
            await asyncio.wait_for(visitor.task, 5)
        for visitor in (visitors[0], visitors[2]):
            error = json.loads(visitor.blocks[-2][6:])["error"]
            assert error["message"] == "the server is going down"
            assert visitor.blocks[-1] == "data: [DONE]"
        assert visitors[1].status == 503
        await visitors[0].until(lambda: idle(site.engine, site.app))

    asyncio.run(main())


def test_draining_refuses_new_requests_only(make_site: MakeSite) -> None:
    async def main() -> None:
        site = make_site("Hello.", engine={"free_tokens": 1})
        site.engine.gate = asyncio.Event()
        running = Visitor(site.app, {"messages": HI, "stream": True}).start()
        await running.until(lambda: site.engine.running)
        site.app.state.front.draining = True
        late = Visitor(site.app, {"messages": HI}).start()
        await asyncio.wait_for(late.task, 5)
        assert late.status == 503
        assert b"shutting_down" in late.data
        site.engine.gate.set()
        await asyncio.wait_for(running.task, 5)
        assert '"finish_reason":"stop"' in running.blocks[-2]

    asyncio.run(main())


def test_s15_a_client_that_does_not_read_stops_the_reading_ahead(make_site: MakeSite) -> None:
    """The front reads a bounded number of events ahead, so that the engine's own bound can act."""

    async def main() -> None:
        site = make_site("word " * 700, engine={"max_model_len": 4096})
        visitor = Visitor(site.app, {"messages": HI, "stream": True})
        reading = asyncio.Event()
        given: list[str] = []
        event_of = site.engine._event

        def counted(*args: Any) -> Any:
            given.append("event")
            return event_of(*args)

        site.engine._event = counted  # type: ignore[method-assign]
        send = visitor._send

        async def slow(message: Any) -> None:
            await reading.wait()
            await send(message)

        visitor._send = slow  # type: ignore[method-assign]
        visitor.start()
        await asyncio.sleep(0.2)
        ahead = len(given)
        await asyncio.sleep(0.1)
        assert 200 < ahead == len(given) < 300
        reading.set()
        await asyncio.wait_for(visitor.task, 10)
        assert visitor.blocks[-1] == "data: [DONE]"
        assert idle(site.engine, site.app)

    asyncio.run(main())


def test_s15_an_engine_that_drops_a_reader_ends_its_stream(make_site: MakeSite) -> None:
    site = make_site(LONG, engine={"fail_after": 4, "fail_with": "abort"})
    response = site.post("/v1/chat/completions", {"messages": HI, "stream": True})
    blocks = response.text.split("\n\n")[:-1]
    assert blocks[-1] == "data: [DONE]"
    assert json.loads(blocks[-2][6:])["error"]["code"] == "aborted"
    assert outcome(site.app, "aborted") == 1


def test_events_that_stop_without_a_reason_are_a_500(make_site: MakeSite) -> None:
    site = make_site()

    async def nothing(*_: object) -> Any:
        return
        yield

    site.engine.generate = nothing  # type: ignore[method-assign]
    assert site.post("/v1/chat/completions", {"messages": HI}).status_code == 500
