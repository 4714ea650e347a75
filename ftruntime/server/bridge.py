"""The front's side of the engine process: start, requests, their events, health, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from ftruntime import log
from ftruntime.engine import messages
from ftruntime.engine.request import make_request
from ftruntime.types import RequestRejectedError, SamplingParams, TokenEvent

QUEUE_EVENTS = 4096
_QUERY_TIMEOUT_S = 10.0
_POLL_MIN_S, _POLL_MAX_S = 0.02, 1.0
_TERM_GRACE_S = 2.0
_EXIT_CODE_WAIT_S = 0.5
# the engine shares the machine with its front; more math threads are the user's choice
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine process is gone or does not answer; tokens of the request are missing."""


@dataclass(frozen=True)
class Health:
    """`phase`: a start-up phase, `ready`, `stalled`, `stopping`, `dead`; `progress`: 0 to 1."""

    ready: bool
    phase: str
    progress: float
    detail: str = ""


@dataclass
class _Stream:
    """One running request as its reader sees it."""

    request_id: str
    items: asyncio.Queue[TokenEvent | Exception] = field(default_factory=asyncio.Queue)
    num_tokens: int = 0
    over: bool = False  # the engine has nothing more to say about it


class Bridge:
    """One engine process. All methods belong to the thread of the asyncio loop that ran `start`."""

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        builder: str = messages.DEFAULT_BUILDER,
        stall_timeout_s: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`config` goes to `builder` (`module:function`) there; `env` adds to its environment."""
        if not stall_timeout_s > 0:
            raise ValueError(f"stall_timeout_s is {stall_timeout_s}, expected a number > 0")
        self.info: dict[str, object] | None = None
        self.num_aborted = 0
        self._start_message = messages.Start(dict(config), builder, log.level_name())
        self._stall_timeout_s = stall_timeout_s
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: dict[str, _Stream] = {}
        self._queries: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._next_query = 0
        self._phase, self._progress = "starting", 0.0
        self._dead: str | None = None
        self._stopping = False
        self._settled = asyncio.Event()  # ready or dead
        self._last_stats: dict[str, object] = {}
        self._asked_s: float | None = None  # when the unanswered health query was sent

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Spawn the engine and return at once; `health` or `wait_ready` tell when it serves."""
        if self._process is not None:
            raise RuntimeError("bridge is started already, expected one start")
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            # a session of its own: an interrupt at the terminal reaches the front only
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ftruntime.engine.process", "--fd", str(fd)],
                stdin=subprocess.DEVNULL, pass_fds=(fd,), env=self._child_env(),
                start_new_session=True,
            )  # fmt: skip
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._write(self._start_message)
        self._tasks = [
            asyncio.create_task(self._read(reader), name="bridge-read"),
            asyncio.create_task(self._watch(), name="bridge-watch"),
        ]

    async def wait_ready(self) -> dict[str, object]:
        """Wait for the end of start-up; the engine's info.

        Raises:
            EngineDeadError: it could not be built (the text is its one sentence) or died.
        """
        await self._settled.wait()
        if self.info is None or self._dead is not None:
            raise EngineDeadError(self._dead)
        return self.info

    def health(self) -> Health:
        """Whether the engine serves now; `detail` is a sentence when it does not."""
        if self._dead is not None:
            return Health(False, "dead", self._progress, self._dead)
        if self._stopping:
            return Health(False, "stopping", self._progress, "the server is shutting down")
        if self.info is None:
            return Health(False, self._phase, self._progress, "the model is being loaded")
        stall = self._stall()
        if stall:
            return Health(False, "stalled", 1.0, stall)
        return Health(True, "ready", 1.0)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[TokenEvent]:
        """Run one sequence (`params.n` is 1) and yield its events; the last has a finish reason.

        Closing the iterator, or cancelling the task that reads it, before the last event aborts the
        request; `finish` first says that its reader has all it wanted.

        Raises:
            RequestRejectedError: before any event: the request can never run, the queue is full, or
                the model is loading.
            EngineDeadError: the engine is gone, possibly after some events.
        """
        stream = await self._submit(request_id, prompt_token_ids, params)
        finished = False
        try:
            while not finished:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished and not stream.over:
                self._abort(stream, "closed by its reader")
            self._forget(stream)

    def finish(self, request_id: str) -> None:
        """End a request whose reader has all it wanted (a stop string); not counted as aborted."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._forget(stream)
        self._write(messages.Cancel(request_id, aborted=False))

    async def stats(self) -> dict[str, object]:
        """The dict of `/v1/stats`, answered even while a step runs.

        Raises:
            EngineDeadError: the engine is gone, or did not answer within 10 s.
        """
        query_id, reply = self._query()
        self._write(messages.StatsQuery(query_id))
        return await self._reply(query_id, reply)

    async def steps(self, since: int) -> dict[str, object]:
        """The dict of `/v1/steps?since=N`; errors as in `stats`."""
        query_id, reply = self._query()
        self._write(messages.StepsQuery(query_id, since))
        return await self._reply(query_id, reply)

    async def stop(self, timeout_s: float = 30.0) -> None:
        """End the engine: ask, after `timeout_s` terminate, then kill.

        Running requests get `EngineDeadError`; new ones should be refused before.
        """
        process = self._process
        if process is None:
            return
        self._stopping = True
        if self._dead is None:
            self._write(messages.Shutdown())
        if not await _ended(process, timeout_s):
            _logger.warning(
                "engine does not end pid=%d waited_s=%.1f action=terminate", process.pid, timeout_s
            )
            process.terminate()
            if not await _ended(process, _TERM_GRACE_S):
                process.kill()
                await _ended(process, float("inf"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._die("the engine was stopped")
        if self._writer is not None:
            self._writer.close()

    def _child_env(self) -> dict[str, str]:
        env = dict(os.environ)
        for name in _THREAD_VARIABLES:
            env.setdefault(name, "1")
        return env | self._env

    async def _submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> _Stream:
        self._require_alive()
        if self.info is None:
            raise RequestRejectedError(
                f"the model is still being loaded (phase {self._phase})",
                code="not_ready",
                status=503,
            )
        if request_id in self._streams:
            raise RequestRejectedError(
                f"request id is {request_id!r}, expected one that is not running",
                code="duplicate_request_id",
            )
        request = make_request(
            request_id, prompt_token_ids, params,
            max_model_len=_integer(self.info, "max_model_len"),
            vocab_size=_integer(self.info, "vocab_size"),
            arrival_s=0.0,  # the engine's clock says it
        )  # fmt: skip
        stream = _Stream(request_id)
        self._streams[request_id] = stream
        self._write(messages.Submit(request))
        return stream

    def _abort(self, stream: _Stream, reason: str) -> None:
        self._forget(stream)
        self.num_aborted += 1
        _logger.info(
            "request aborted request_id=%s tokens=%d reason=%r",
            stream.request_id, stream.num_tokens, reason,
        )  # fmt: skip
        self._write(messages.Cancel(stream.request_id))

    def _forget(self, stream: _Stream) -> None:
        stream.over = True
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self._writer is None:
            raise EngineDeadError("the engine is not started")

    def _write(self, message: messages.FrontMessage) -> None:
        # never awaited: frames are small, and an abort must go out from a cancelled task
        if self._dead is None and self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.frame(message))

    def _query(self) -> tuple[int, asyncio.Future[dict[str, object]]]:
        self._require_alive()
        query_id, self._next_query = self._next_query, self._next_query + 1
        reply: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = reply
        return query_id, reply

    async def _reply(
        self,
        query_id: int,
        reply: asyncio.Future[dict[str, object]],
        timeout_s: float | None = _QUERY_TIMEOUT_S,
    ) -> dict[str, object]:
        try:
            return await asyncio.wait_for(reply, timeout_s)
        except asyncio.TimeoutError as error:
            raise EngineDeadError(f"the engine did not answer within {timeout_s:g} s") from error
        finally:
            self._queries.pop(query_id, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await messages.read(reader)) is not None:
            self._receive(message)
        await self._bury()

    def _receive(self, message: messages.EngineMessage) -> None:
        if isinstance(message, messages.Events):
            for event in message.events:
                self._deliver(event)
        elif isinstance(message, messages.StatsReply):
            self._answer(message.query_id, message.stats)
        elif isinstance(message, messages.StepsReply):
            self._answer(message.query_id, message.steps)
        elif isinstance(message, messages.Rejected):
            self._reject(message)
        elif isinstance(message, messages.Phase):
            self._phase, self._progress = message.phase, message.progress
        elif isinstance(message, messages.Ready):
            self.info = message.info
            self._settled.set()
        else:
            self._die(message.message)

    def _deliver(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:  # it was aborted while this event was on its way
            return
        stream.num_tokens += event.token_id is not None
        if stream.items.qsize() >= QUEUE_EVENTS and event.finish_reason is None:
            reason = f"its reader left {QUEUE_EVENTS} events unread"
            self._abort(stream, reason)
            event = TokenEvent(
                event.request_id, None, "abort", error=f"the request was aborted: {reason}"
            )
        elif event.finish_reason is not None:
            self._forget(stream)
        stream.items.put_nowait(event)

    def _reject(self, message: messages.Rejected) -> None:
        stream = self._streams.get(message.request_id)
        if stream is not None:
            self._forget(stream)
            error = RequestRejectedError(message.message, code=message.code, status=message.status)
            stream.items.put_nowait(error)

    def _answer(self, query_id: int, reply: dict[str, object]) -> None:
        future = self._queries.pop(query_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _bury(self) -> None:
        """The socket has ended: learn how the process did, then tell everyone who waits."""
        process = self._process
        ended = process is not None and await _ended(process, _EXIT_CODE_WAIT_S)
        code = process.returncode if process is not None and ended else None
        self._die(
            "the engine process ended" + (f" with exit code {code}" if code is not None else "")
        )

    def _die(self, detail: str) -> None:
        if self._dead is not None:
            return
        self._dead = detail
        if not self._stopping:
            _logger.error("engine dead running=%d detail=%r", len(self._streams), detail)
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.items.put_nowait(EngineDeadError(detail))
        for future in self._queries.values():
            if not future.done():
                future.set_exception(EngineDeadError(detail))
        self._settled.set()

    async def _watch(self) -> None:
        """Ask for stats again and again, so that `health` knows of a step that does not end."""
        period_s = min(max(self._stall_timeout_s / 4, _POLL_MIN_S), _POLL_MAX_S)
        await self._settled.wait()
        with contextlib.suppress(EngineDeadError):
            while self._dead is None:
                query_id, reply = self._query()
                self._asked_s = time.monotonic()
                self._write(messages.StatsQuery(query_id))
                self._last_stats = await self._reply(query_id, reply, None)
                self._asked_s = None
                await asyncio.sleep(period_s)

    def _stall(self) -> str:
        """A sentence on what has not moved for the stall timeout; empty when all is well."""
        limit_s = self._stall_timeout_s
        silent_s = 0.0 if self._asked_s is None else time.monotonic() - self._asked_s
        if silent_s > limit_s:
            return f"the engine has not answered for {silent_s:.1f} s, more than {limit_s:g} s"
        for key, what in (
            ("running_step_s", "a step has been running"),
            ("waiting_without_step_s", "requests have been waiting without a step"),
        ):
            age_s = self._last_stats.get(key, 0.0)
            if isinstance(age_s, int | float) and age_s > limit_s:
                return f"{what} for {age_s:.1f} s, more than {limit_s:g} s"
        return ""


def _integer(info: Mapping[str, object], key: str) -> int:
    value = info.get(key)
    if not isinstance(value, int):
        raise TypeError(f"engine info {key} is {value!r}, expected an integer")
    return value


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the process without a thread that an interrupted loop would have to join."""
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(0.01)
    return True
