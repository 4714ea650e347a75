"""The front's side of the engine: feeds it requests, hands out their events, watches its health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from ftruntime import log
from ftruntime.engine import messages
from ftruntime.engine.request import make_request
from ftruntime.server.link import EngineDeadError, EngineLink
from ftruntime.stopped import StoppedFor
from ftruntime.types import RequestRejectedError, SamplingParams, TokenEvent

__all__ = ["QUEUE_EVENTS", "Bridge", "EngineDeadError", "Health"]

QUEUE_EVENTS = 4096
_QUERY_TIMEOUT_S = 10.0
_POLL_MIN_S, _POLL_MAX_S = 0.02, 1.0
_DIAGNOSIS_S = 3.0  # for the engine to find out by itself which rank it waits for

_logger = logging.getLogger(__name__)


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
    over: bool = False  # nothing more will be put into `items`


class Bridge:
    """One engine process. All methods belong to the asyncio loop that ran `start`."""

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        builder: str = messages.DEFAULT_BUILDER,
        stall_timeout_s: float = 120.0,
        end_stalled: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`config` goes to `builder` (`module:function`) there; `env` adds to its environment.

        `end_stalled`: an engine that does not move is killed, as the other ranks would wait for it
        without end.
        """
        if not stall_timeout_s > 0:
            raise ValueError(f"stall_timeout_s is {stall_timeout_s}, expected a number > 0")
        self.info: dict[str, object] | None = None
        self.num_aborted = 0
        self._start_message = messages.Start(dict(config), builder, log.level_name())
        self._env = dict(env or {})
        self._stall_timeout_s = stall_timeout_s
        self._period_s = min(max(stall_timeout_s / 4, _POLL_MIN_S), _POLL_MAX_S)
        self._end_stalled = end_stalled
        self._link = EngineLink(self._receive, self._ended)
        self._watching: list[asyncio.Task[None]] = []
        self._streams: dict[str, _Stream] = {}
        self._ending: set[str] = set()  # cancelled, their last event still on its way
        self._phase, self._progress = "starting", 0.0
        self._stopping = False
        self._settled = asyncio.Event()  # ready or dead
        self._lost = asyncio.Event()  # dead, and nobody asked for it
        self._last_stats: dict[str, object] = {}
        self._asked_s: float | None = None  # when the unanswered health question was sent

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once started."""
        return self._link.pid

    async def start(self) -> None:
        """Spawn the engine and return at once; `health` and `wait_ready` tell when it serves."""
        await self._link.start(self._start_message, self._env)
        self._watching = [asyncio.create_task(self._watch(), name="engine-health")]
        if self._end_stalled:
            self._watching.append(asyncio.create_task(self._look_for_stalls(), name="stalls"))

    async def wait_ready(self) -> dict[str, object]:
        """Wait for the end of start-up; the engine's info.

        Raises:
            EngineDeadError: it could not be built (the text is its one sentence) or died.
        """
        await self._settled.wait()
        self._link.require_alive()
        assert self.info is not None  # it lives and start-up is over
        return self.info

    async def wait_end(self) -> str:
        """Wait until the engine is gone without having been stopped; how it ended."""
        await self._lost.wait()
        return self._link.end or ""

    def health(self) -> Health:
        """Whether the engine serves now; `detail` is a sentence when it does not."""
        if self._link.end is not None:
            return Health(False, "dead", self._progress, self._link.end)
        if self._stopping:
            return Health(False, "stopping", self._progress, "the server is shutting down")
        if self.info is None:
            return Health(False, self._phase, self._progress, "the model is being loaded")
        stall = self._stall()
        return Health(False, "stalled", 1.0, stall) if stall else Health(True, "ready", 1.0)

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
        stream = self._submit(request_id, prompt_token_ids, params)
        finished = False
        try:
            while not finished:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not stream.over:
                self._abort(stream, "closed by its reader")

    def finish(self, request_id: str) -> None:
        """End a request whose reader has all it wanted (a stop string); not counted as aborted."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._cancel(stream, aborted=False)
            stream.items.put_nowait(TokenEvent(request_id, None, "stop"))

    async def stats(self) -> dict[str, object]:
        """The dict of `/v1/stats`, answered even while a step runs.

        Raises:
            EngineDeadError: the engine is gone, or did not answer within 10 s.
        """
        return await self._link.ask(messages.StatsQuery, _QUERY_TIMEOUT_S)

    async def steps(self, since: int) -> dict[str, object]:
        """The dict of `/v1/steps?since=N`; errors as in `stats`."""
        return await self._link.ask(
            lambda query_id: messages.StepsQuery(query_id, since), _QUERY_TIMEOUT_S
        )

    async def stop(self, timeout_s: float = 30.0) -> None:
        """End the engine: ask, after `timeout_s` terminate, then kill.

        Running requests get `EngineDeadError`; new ones should be refused before.
        """
        self._stopping = True
        await self._link.stop(timeout_s)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def _submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> _Stream:
        self._link.require_alive()
        if self.info is None:
            raise RequestRejectedError(
                f"the model is still being loaded (phase {self._phase})",
                code="not_ready",
                status=503,
            )
        if request_id in self._streams or request_id in self._ending:
            raise RequestRejectedError(
                f"request id is {request_id!r}, expected one that is not running",
                code="duplicate_request_id",
            )
        request = make_request(
            request_id, prompt_token_ids, params,
            max_model_len=_integer(self.info, "max_model_len"),
            vocab_size=_integer(self.info, "vocab_size"),
            arrival_s=0.0,  # the engine's clock says it
            eos_token_ids=_integers(self.info, "eos_token_ids"),
        )  # fmt: skip
        stream = _Stream(request_id)
        self._streams[request_id] = stream
        self._link.write(messages.Submit(request))
        return stream

    def _abort(self, stream: _Stream, reason: str) -> None:
        self.num_aborted += 1
        _logger.info(
            "request aborted request_id=%s tokens=%d reason=%r",
            stream.request_id, stream.num_tokens, reason,
        )  # fmt: skip
        self._cancel(stream, aborted=True)

    def _cancel(self, stream: _Stream, *, aborted: bool) -> None:
        self._close(stream)
        self._ending.add(stream.request_id)
        self._link.write(messages.Cancel(stream.request_id, aborted))

    def _close(self, stream: _Stream) -> None:
        stream.over = True
        del self._streams[stream.request_id]

    def _receive(self, message: messages.EngineMessage) -> None:
        if isinstance(message, messages.Events):
            for event in message.events:
                self._deliver(event)
        elif isinstance(message, messages.Rejected):
            self._reject(message)
        elif isinstance(message, messages.Phase):
            self._phase, self._progress = message.phase, message.progress
        elif isinstance(message, messages.Ready):
            self.info = message.info
            self._settled.set()
        elif isinstance(message, messages.Failed):
            self._link.die(message.message)

    def _deliver(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:  # it was cancelled while this event was on its way
            if event.finish_reason is not None:
                self._ending.discard(event.request_id)
            return
        stream.num_tokens += event.token_id is not None
        if event.finish_reason is not None:
            self._close(stream)
        elif stream.items.qsize() >= QUEUE_EVENTS:
            reason = f"its reader left {QUEUE_EVENTS} events unread"
            self._abort(stream, reason)
            text = f"the request was aborted: {reason}"
            event = TokenEvent(event.request_id, None, "abort", error=text)
        stream.items.put_nowait(event)

    def _reject(self, message: messages.Rejected) -> None:
        self._ending.discard(message.request_id)
        stream = self._streams.get(message.request_id)
        if stream is not None:
            self._close(stream)
            error = RequestRejectedError(message.message, code=message.code, status=message.status)
            stream.items.put_nowait(error)

    def _ended(self, detail: str) -> None:
        if not self._stopping:
            _logger.error("engine dead running=%d detail=%r", len(self._streams), detail)
        for stream in list(self._streams.values()):
            self._close(stream)
            stream.items.put_nowait(EngineDeadError(detail))
        self._settled.set()
        if not self._stopping:
            self._lost.set()

    async def _watch(self) -> None:
        """Ask for stats again and again, so that `health` knows of a step that does not end."""
        await self._settled.wait()
        with contextlib.suppress(EngineDeadError):
            while True:
                self._asked_s = time.monotonic()
                self._last_stats = await self._link.ask(messages.StatsQuery, None)
                self._asked_s = None
                await asyncio.sleep(self._period_s)

    async def _look_for_stalls(self) -> None:
        assert self.pid is not None
        stopped = StoppedFor(self.pid)
        while self._link.end is None:
            await asyncio.sleep(self._period_s)
            stall = self._stall(_DIAGNOSIS_S)
            # loading takes as long as it takes, but not while nothing can run
            if stopped.seconds() > self._stall_timeout_s and self.info is None:
                stall = "the engine is stopped"
            if stall:
                self._link.kill(f"{stall}: the ranks are ended")

    def _stall(self, longer_s: float = 0.0) -> str:
        """A sentence on what has not moved for the stall timeout and longer; empty when all is
        well."""
        limit_s = self._stall_timeout_s
        silent_s = 0.0 if self._asked_s is None else time.monotonic() - self._asked_s
        if silent_s > limit_s + longer_s:
            return f"the engine has not answered for {silent_s:.1f} s, more than {limit_s:g} s"
        for key, what in (
            ("running_step_s", "a step has been running"),
            ("waiting_without_step_s", "requests have been waiting without a step"),
        ):
            age_s = self._last_stats.get(key, 0.0)
            if isinstance(age_s, int | float) and age_s > limit_s + longer_s:
                return f"{what} for {age_s:.1f} s, more than {limit_s:g} s"
        return ""


def _integer(info: Mapping[str, object], key: str) -> int:
    value = info.get(key)
    if not isinstance(value, int):
        raise TypeError(f"engine info {key} is {value!r}, expected an integer")
    return value


def _integers(info: Mapping[str, object], key: str) -> list[int]:
    value = info.get(key)
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise TypeError(f"engine info {key} is {value!r}, expected a list of integers")
    return value
