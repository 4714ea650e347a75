"""What holds for every request: its id in the response, and a bounded body.

The middleware is plain ASGI, so that a stream reaches its client piece by piece.
"""

from __future__ import annotations

import re
import secrets

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ftruntime.server.errors import ApiError

_USABLE_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_DISCARD_FACTOR = 4


class RequestIdMiddleware:
    """Takes a usable ``X-Request-Id`` or makes one; response and log carry it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    """The id that the middleware chose."""
    return str(request.state.request_id)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, whatever its Content-Type.

    A body that says it is oversize is refused unread. The rest of one that does not say so is read
    and thrown away, so that the client gets to the answer.

    Raises:
        ApiError: 413; longer than ``max_bytes``.
        ClientDisconnect: the client left.
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
        if size > max_bytes * _DISCARD_FACTOR:
            break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"body is over {max_bytes / (1 << 20):.4g} MB, expected at most that (--max-body-mb)",
        status=413, code="body_too_large",
    )  # fmt: skip


__all__ = ["ClientDisconnect", "RequestIdMiddleware", "read_body", "request_id_of"]
