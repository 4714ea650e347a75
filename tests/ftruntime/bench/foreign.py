"""An OpenAI-compatible server that is not ours, in a thread, as bad as a test wants it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]
Raw = tuple[int, dict[str, str], bytes]  # status, headers and body of an answer
START_S = 10.0


@dataclass
class Behaviour:
    """How the server answers. A prompt of more than `long_words` words is the long prompt."""

    tokens_per_word: int = 3
    tokens_of_head: int = 7
    tokens_per_piece: int = 1
    piece_s: float = 0.004
    long_words: int = 130
    prefill_s: float = 0.2  # of the long prompt; no stream moves meanwhile
    stream_usage: bool = True
    probe_usage: bool = True
    refused_fields: tuple[str, ...] = ()
    refused_status: int = 400
    long_answer: tuple[int, Json] | None = None
    break_after: int | None = None  # pieces after which the connection is cut
    end_after: int | None = None  # pieces after which the stream ends without a finish
    error_after: int | None = None  # of the first stream
    stall_after: int | None = None  # pieces after which only comments and empty events come
    stop_after: int | None = None  # tokens after which the model has finished
    newline: str = "\n"
    piece: str = "x"
    comments: bool = False
    role_chunk: bool = False
    delta_field: str = "content"
    models: tuple[str, ...] = ("other",)
    max_model_len: int | None = None
    max_running: int = 1000  # streams beyond wait for the end of another
    raw_models: Raw | None = None
    raw_probe: Raw | None = None
    raw_event: bytes | None = None  # the first one of every stream
    stats: bytes | None = None
    cached_tokens: int | None = None  # of every prompt
    key: str | None = None


@dataclass
class Foreign:
    """The app, and what it was asked."""

    behaviour: Behaviour
    bodies: list[Json] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    open_streams: int = 0
    num_streams: int = 0
    authorizations: set[str | None] = field(default_factory=set)
    rows: asyncio.Semaphore | None = None

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/stats", self._stats),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
            ]
        )

    @property
    def streamed(self) -> list[Json]:
        return [body for body in self.bodies if body["stream"]]

    def prompt_tokens(self, body: Json) -> int:
        return self.behaviour.tokens_of_head + self.behaviour.tokens_per_word * _num_words(body)

    async def _stats(self, request: Request) -> Response:
        stats = self.behaviour.stats
        return Response(stats or b"", status_code=404 if stats is None else 200)

    async def _models(self, request: Request) -> Response:
        self.authorizations.add(request.headers.get("authorization"))
        if self.behaviour.raw_models is not None:
            return _raw(self.behaviour.raw_models)
        if self.behaviour.key is not None:
            given = request.headers.get("authorization")
            if given != f"Bearer {self.behaviour.key}":
                return JSONResponse({"detail": "who are you?"}, status_code=401)
        told = self.behaviour.max_model_len
        more = {} if told is None else {"max_model_len": told}
        return JSONResponse({"data": [{"id": name, **more} for name in self.behaviour.models]})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        how = self.behaviour
        for name in how.refused_fields:
            if name in body:
                error = {"message": f"unknown argument: {name}"}
                return JSONResponse({"error": error}, status_code=how.refused_status)
        self.bodies.append(body)
        self.paths.append(request.url.path)
        is_long = _num_words(body) > how.long_words
        if is_long and how.long_answer is not None:
            status, value = how.long_answer
            return JSONResponse(value, status_code=status)
        if not body["stream"]:
            if how.raw_probe is not None:
                return _raw(how.raw_probe)
            usage = {"prompt_tokens": self.prompt_tokens(body), "completion_tokens": 1}
            return JSONResponse({"usage": usage} if how.probe_usage else {})
        events = self._in_turn(self._events(body, is_long, "chat" in request.url.path))
        return StreamingResponse(events, media_type="text/event-stream")

    async def _in_turn(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        self.rows = self.rows or asyncio.Semaphore(self.behaviour.max_running)
        async with self.rows:
            if self.behaviour.raw_event is not None:
                yield f"data: {self.behaviour.raw_event.decode()}{self.behaviour.newline * 2}"
            async for event in events:
                yield event

    async def _events(self, body: Json, is_long: bool, chat: bool) -> AsyncIterator[str]:
        how = self.behaviour
        self.open_streams += 1
        self.num_streams += 1
        is_first = self.num_streams == 1
        try:
            if is_long:
                # one thread: a blocking prefill holds every stream back
                time.sleep(how.prefill_s)
            if how.role_chunk:
                yield self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            left, pieces = body["max_tokens"], 0
            finish = "length"
            if how.stop_after is not None and how.stop_after < left and not is_long:
                left, finish = how.stop_after, "stop"
            total = left
            while left:
                await asyncio.sleep(how.piece_s)
                if not is_long and pieces == how.break_after:
                    raise ConnectionError("the test cuts the connection")
                if not is_long and pieces == how.end_after:
                    return
                if is_first and pieces == how.error_after:
                    yield self._event({"error": {"message": "out of\nmemory", "code": 500}})
                    return
                while not is_long and pieces == how.stall_after:
                    yield f": still here{how.newline * 2}"
                    yield self._event({"choices": [self._choice(chat, "", None)]})
                    await asyncio.sleep(0.02)
                if how.comments:
                    yield f": ping{how.newline * 2}event: message{how.newline}"
                count = min(left, how.tokens_per_piece)
                left, pieces = left - count, pieces + 1
                yield self._event({"choices": [self._choice(chat, how.piece * count, None)]})
            yield self._event({"choices": [self._choice(chat, "", finish)]})
            asked = (body.get("stream_options") or {}).get("include_usage")
            if how.stream_usage and asked:
                prompt = self.prompt_tokens(body)
                usage: Json = {"prompt_tokens": prompt, "completion_tokens": total}
                if how.cached_tokens is not None:
                    usage["prompt_tokens_details"] = {"cached_tokens": how.cached_tokens}
                yield self._event({"choices": [], "usage": usage})
            yield f"data: [DONE]{how.newline * 2}"
        finally:
            self.open_streams -= 1

    def _choice(self, chat: bool, text: str, finish: str | None) -> Json:
        holder = {"delta": {self.behaviour.delta_field: text}} if chat else {"text": text}
        return {"index": 0, **holder, "finish_reason": finish}

    def _event(self, value: Json) -> str:
        text = json.dumps(value, ensure_ascii=False)
        return f"data: {text}{self.behaviour.newline * 2}"


def _raw(answer: Raw) -> Response:
    status, headers, body = answer
    return Response(body, status_code=status, headers=headers)


def _num_words(body: Json) -> int:
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return len(text.partition(": ")[2].split())


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[tuple[str, Foreign]]:
    """Base URL and the server behind it."""
    foreign = Foreign(behaviour)
    config = uvicorn.Config(
        foreign.app(), port=0, log_level="critical", timeout_graceful_shutdown=1, lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + START_S
        while not server.started:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", foreign
    finally:
        server.should_exit = True
        thread.join(10)
