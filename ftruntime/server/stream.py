"""Answers on the wire: server-sent events with keep-alive comments, or one JSON body.

Both end, and free what they hold at the engine, as soon as their client goes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ftruntime.metrics import Outcome
from ftruntime.server.choice import Piece
from ftruntime.server.errors import ApiError
from ftruntime.server.generation import Generation
from ftruntime.server.shapes import Shape

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_CLIENT_CLOSED = 499


class ClientGoneError(Exception):
    """The client closed the connection before its answer."""


async def answer_whole(
    request: Request, generation: Generation, shape: Shape, num_choices: int
) -> Response:
    """The whole answer as one JSON body.

    Raises:
        ApiError: refused or failed; nothing was sent.
    """
    try:
        generation.start()
        pieces = await _while_connected(request, _collect(generation, num_choices))
    except BaseException as error:
        generation.settle(*_outcome(error))
        if isinstance(error, ClientGoneError):
            return Response(status_code=_CLIENT_CLOSED)
        raise
    generation.settle("ok")
    return JSONResponse(shape.whole(pieces, generation.usage))


async def answer_stream(
    request: Request,
    generation: Generation,
    shape: Shape,
    *,
    include_usage: bool,
    keep_alive_s: float,
) -> Response:
    """A stream of chunks. It starts with the first piece, or after ``keep_alive_s``.

    Until then a refusal has its own HTTP status; afterwards an error is an event of the stream.

    Raises:
        ApiError: refused or failed before the stream started.
    """
    pieces = generation.pieces(keep_alive_s)
    try:
        generation.start()
        first = await _while_connected(request, _first(pieces))
    except BaseException as error:
        generation.settle(*_outcome(error))
        if isinstance(error, ClientGoneError):
            return Response(status_code=_CLIENT_CLOSED)
        raise
    return _EventResponse(_events(generation, pieces, first, shape, include_usage), generation)


class _EventResponse(StreamingResponse):
    """A stream that settles its generation however it ends, a broken connection included."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            # a proxy that buffers would turn the stream into one answer
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.settle("aborted", "client disconnected")


async def _events(
    generation: Generation,
    pieces: AsyncIterator[tuple[int, Piece] | None],
    first: tuple[int, Piece] | None,
    shape: Shape,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    opened: set[int] = set()
    try:
        item: tuple[int, Piece] | None = first
        while True:
            if item is None:
                yield KEEP_ALIVE
            else:
                for chunk in _chunks(item, shape, opened):
                    yield chunk
            try:
                item = await anext(pieces)
            except StopAsyncIteration:
                break
        generation.settle("ok")
        if include_usage:
            yield _event(shape.usage_chunk(generation.usage))
    except ApiError as error:
        generation.settle(*_outcome(error))
        yield _event(error.body())
    yield DONE


def _chunks(item: tuple[int, Piece], shape: Shape, opened: set[int]) -> list[bytes]:
    """The chunk of one piece, after the choice's opening one."""
    index, piece = item
    chunks = []
    if index not in opened:
        opened.add(index)
        opening = shape.opening(index)
        if opening is not None:
            chunks.append(_event(opening))
    chunks.append(_event(shape.chunk(index, piece)))
    return chunks


def _event(data: dict[str, object]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


async def _collect(generation: Generation, num_choices: int) -> list[list[Piece]]:
    choices: list[list[Piece]] = [[] for _ in range(num_choices)]
    async for item in generation.pieces(tick_s=60.0):
        if item is not None:
            choices[item[0]].append(item[1])
    return choices


async def _first(
    pieces: AsyncIterator[tuple[int, Piece] | None],
) -> tuple[int, Piece] | None:
    return await anext(pieces)


async def _while_connected(request: Request, work: Coroutine[object, object, T]) -> T:
    """The result of ``work``, or `ClientGoneError` as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _outcome(error: BaseException) -> tuple[Outcome, str]:
    """How a generation that ended with ``error`` is counted, and the reason to log."""
    if isinstance(error, ApiError):
        if error.status == 408:
            return "timeout", error.message
        if error.code in ("aborted", "shutting_down"):
            return "aborted", error.message
        return ("rejected" if error.status < 500 else "error"), error.message
    if isinstance(error, ClientGoneError):
        return "aborted", "client disconnected"
    return ("aborted" if isinstance(error, asyncio.CancelledError) else "error"), repr(error)
