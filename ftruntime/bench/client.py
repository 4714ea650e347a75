"""A client of any OpenAI-compatible server that notes when each piece of a stream arrives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Final, TypeVar, cast

import httpx

from ftruntime.bench.recording import Json, Recording, integer, objects, short
from ftruntime.bench.settings import BenchError, StallSettings

_CONNECT_S: Final = 10.0
_OPTIONAL: Final[Json] = {
    "ignore_eos": True, "seed": 0, "stream_options": {"include_usage": True},
}  # fmt: skip

# the host name of a redirect is decoded even where nobody follows it
_BROKEN: Final = (httpx.RequestError, UnicodeError)

T = TypeVar("T")

_logger = logging.getLogger(__name__)


def check_url(settings: StallSettings) -> None:
    """Refuse a base URL whose host name has no meaning.

    Raises:
        ValueError: ``--base-url is VALUE, expected ...``.
    """
    try:
        host = httpx.URL(settings.root).host
    except (httpx.InvalidURL, UnicodeError):
        host = ""
    if not host:
        settings.refuse_url()


class Server:
    """One server and how to ask it. Use as an async context manager.

    Optional request fields that it refuses by name are left out from then on.
    """

    def __init__(self, settings: StallSettings) -> None:
        self.root = settings.root
        self._settings = settings
        self._model = settings.model
        self._optional = dict(_OPTIONAL)
        key = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=self.root,
            auth=settings.login,
            # a compressed stream would be held back until a block of it is full
            headers={"Accept-Encoding": "identity", **key},
            timeout=httpx.Timeout(settings.timeout_s, connect=_CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    @property
    def _limit(self) -> str:
        return f"for {self._settings.timeout_s:g} s (--timeout-s)"

    @property
    def model(self) -> str | None:
        """The model asked for, once known."""
        return self._model

    async def find_model(self) -> int | None:
        """Take the first model of ``/v1/models`` unless one was named.

        Returns:
            Tokens that the model holds for prompt and output of a request; None where untold.

        Raises:
            BenchError: none was named, and there is no server or it lists none.
        """
        named, listed = self._model, None
        with contextlib.nullcontext() if named is None else contextlib.suppress(BenchError):
            listed = await self.read_json("/v1/models", "the list of models")
        for card in objects(listed or {}, "data"):
            name = card.get("id")
            # a name that cannot be printed is none
            usable = isinstance(name, str) and name and name.isprintable()
            if usable and named in (None, name):
                self._model = str(name)
                return integer(card, "max_model_len")
        if named is None:
            raise BenchError(f"{self.root} lists no model at /v1/models, expected --model")
        return None

    async def read_json(self, path: str, what: str) -> Json | None:
        """The JSON object at `path`; None when the server has none there."""
        try:
            answer = await self._http.get(path)
        except _BROKEN as error:
            raise self._lost(what, error) from error
        text = answer.content.decode(errors="replace")
        if answer.status_code in (401, 403):
            raise self._refused(what, answer.status_code, text)
        return _object(text) if answer.status_code == 200 else None

    async def prompt_tokens(self, prompt: str) -> int:
        """Length of a prompt by the server's own count, from generating one token."""
        what = "a short prompt"
        try:
            async with self._sent(prompt, 1, stream=False, who=what) as answer:
                body = _object((await answer.aread()).decode(errors="replace")) or {}
        except _BROKEN as error:
            raise self._lost(what, error) from error
        usage = body.get("usage")
        count = integer(usage if isinstance(usage, dict) else {}, "prompt_tokens")
        if count is None:
            raise BenchError(f"{self.root} answered {what} without usage.prompt_tokens")
        return count

    async def read(self, recording: Recording, prompt: str, num_tokens: int) -> None:
        """Generate and note every piece.

        Raises:
            BenchError: refused, lost, ended before its finish, or no piece within the timeout.
        """
        try:
            recording.sent_s = time.monotonic()
            async with aclosing(self._events(recording, prompt, num_tokens)) as events:
                await self._note(recording, events)
        except _BROKEN as error:
            raise self._lost(recording.progress, error) from error
        finally:
            recording.end_s = time.monotonic()
            recording.started.set()

    async def _note(self, recording: Recording, events: AsyncIterator[Json]) -> None:
        limit_s = self._settings.timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                # comments that keep the connection open do not count
                event = await within(anext(events), deadline_s - time.monotonic())
            except StopAsyncIteration:
                break
            except asyncio.TimeoutError as error:
                sentence = f"{self.root} sent nothing {self._limit} to {recording.progress}"
                raise BenchError(sentence) from error
            if event.get("error"):
                raise BenchError(
                    f"{self.root} ended {recording.progress} with an error: {_message(event)}"
                )
            recording.take(event, time.monotonic())
            if recording.piece_s:
                deadline_s = recording.piece_s[-1] + limit_s
        if recording.finish_reason is None and not recording.done:
            raise BenchError(f"{self.root} broke off {recording.progress}, without its end")

    async def _events(
        self, recording: Recording, prompt: str, num_tokens: int
    ) -> AsyncGenerator[Json, None]:
        """The JSON objects of a stream, up to its ``[DONE]`` or its end."""
        async with self._sent(prompt, num_tokens, stream=True, who=recording.who) as answer:
            async for line in _lines(answer):
                name, _, value = line.partition(b":")
                if name != b"data":
                    continue
                data = value.strip()
                if data == b"[DONE]":
                    recording.done = True
                    return
                event = _object(data.decode(errors="replace"))
                if event is None:
                    shown = short(data.decode(errors="replace"))
                    raise BenchError(
                        f"{self.root} sent {shown} to {recording.progress}, expected JSON"
                    )
                yield event

    @asynccontextmanager
    async def _sent(
        self, prompt: str, num_tokens: int, *, stream: bool, who: str
    ) -> AsyncIterator[httpx.Response]:
        """The answer with status 200, its body unread; closed however its reader leaves."""
        answer = await self._send(prompt, num_tokens, stream, who)
        try:
            yield answer
        finally:
            await answer.aclose()

    async def _send(self, prompt: str, num_tokens: int, stream: bool, who: str) -> httpx.Response:
        chat = self._settings.endpoint == "chat"
        path = "/v1/chat/completions" if chat else "/v1/completions"
        while True:
            body = self._body(prompt, num_tokens, stream)
            request = self._http.build_request("POST", path, json=body)
            answer = await self._http.send(request, stream=True)
            if answer.status_code == 200:
                return answer
            text = (await answer.aread()).decode(errors="replace")
            await answer.aclose()
            refused = [name for name in _OPTIONAL if name in body and name in text]
            if answer.status_code not in (400, 422) or not refused:
                raise self._refused(who, answer.status_code, text)
            for name in refused:
                # another stream may have met the same refusal
                if self._optional.pop(name, None) is not None:
                    _logger.warning("server refuses a request field, left out name=%s", name)

    def _body(self, prompt: str, num_tokens: int, stream: bool) -> dict[str, object]:
        asked: dict[str, object] = {"prompt": prompt}
        if self._settings.endpoint == "chat":
            asked = {"messages": [{"role": "user", "content": prompt}]}
        optional = {k: v for k, v in self._optional.items() if stream or k != "stream_options"}
        return {
            "model": self._model, **asked, "max_tokens": num_tokens, "temperature": 0,
            "stream": stream, **optional,
        }  # fmt: skip

    def _refused(self, who: str, status: int, text: str) -> BenchError:
        message = _message(_object(text) or {}) or short(text)
        other = "completions" if self._settings.endpoint == "chat" else "chat"
        no_place = status in (404, 405) and "model" not in message.lower()
        hint = f" (--endpoint {other} asks at another place)" if no_place else ""
        return BenchError(f"{self.root} refused {who} with status {status}: {message}{hint}")

    def _lost(self, who: str, error: Exception) -> BenchError:
        if isinstance(error, httpx.ReadTimeout):
            return BenchError(f"{self.root} sent nothing {self._limit} to {who}")
        said = short(str(error) or type(error).__name__)
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return BenchError(f"{self.root} cannot be reached ({said}), expected a running server")
        return BenchError(f"{self.root} lost {who} ({type(error).__name__}: {said})")


async def within(work: Awaitable[T], limit_s: float) -> T:
    """The result of `work`, or TimeoutError; a cancellation that meets the result is not lost, as
    it would be in `asyncio.wait_for` before Python 3.12.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=max(0.0, limit_s))
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a body. Only a newline ends one: texts may hold other separators unescaped."""
    rest = b""
    async for block in answer.aiter_bytes():
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


def _object(text: str) -> Json | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast(Json, value) if isinstance(value, dict) else None


def _message(body: Json) -> str:
    """What an error body says, in the forms servers use."""
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or ""
    return short(error if isinstance(error, str) else json.dumps(error)) if error else ""
