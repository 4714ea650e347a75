"""One client request while it is generated: its sequences, merged into one stream of pieces."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from ftruntime.metrics import Outcome, ServerMetrics
from ftruntime.server.bridge import EngineDeadError
from ftruntime.server.choice import Choice, Piece
from ftruntime.server.client import EngineClient
from ftruntime.server.errors import ApiError, from_rejection
from ftruntime.types import RequestRejectedError, SamplingParams, TokenEvent

_BUFFERED_EVENTS = 256
"""Events read ahead of the client; beyond that the engine's own bound for a slow reader acts."""
_MAX_SUBMITTED = 64
"""Sequences of one request at the engine at once; a request of many must not fill its queue."""
_RETRY_S = 0.1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoiceJob:
    """One choice to generate: its prompt, its own parameters (``n`` is 1), its reader."""

    prompt: tuple[int, ...]
    params: SamplingParams
    choice: Choice


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generation:
    """Runs the sequences of one request from `start` to `settle`.

    Every way out goes through `settle`, which ends what still runs at the engine, logs one line and
    counts the outcome.

    Args:
        request_id: of the client's request; sequence ``i`` is ``{request_id}-{i}`` at the engine.
        sequences: in the order of their choice indices.
        num_prompts: how many prompts they stand for, in equal shares.
        timeout_s: limit for the whole, 0 for none.
        on_end: called once, by the first `settle`.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: ServerMetrics,
        request_id: str,
        sequences: Sequence[ChoiceJob],
        *,
        num_prompts: int,
        timeout_s: float,
        on_end: Callable[[Generation], None],
    ) -> None:
        self.request_id = request_id
        self._client = client
        self._metrics = metrics
        self._sequences = tuple(sequences)
        self._num_prompts = num_prompts
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._start_s = time.monotonic()
        self._first_token_s: float | None = None
        self._items: asyncio.Queue[tuple[int, TokenEvent | ApiError]] = asyncio.Queue(
            _BUFFERED_EVENTS
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._slots = asyncio.Semaphore(_MAX_SUBMITTED)
        self._interruption: ApiError | None = None
        self.outcome: Outcome | None = None

    def start(self) -> None:
        """Submit every sequence."""
        self._tasks = [
            asyncio.create_task(self._pump(i), name=f"pump-{self._engine_id(i)}")
            for i in range(len(self._sequences))
        ]
        self._metrics.prompt_tokens.inc(self.usage.prompt_tokens)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        firsts = self._sequences[:: len(self._sequences) // self._num_prompts]
        return Usage(
            prompt_tokens=sum(len(item.prompt) for item in firsts),
            completion_tokens=sum(item.choice.num_tokens for item in self._sequences),
            cached_tokens=sum(item.choice.num_cached_tokens for item in firsts),
        )

    async def pieces(self, tick_s: float) -> AsyncIterator[tuple[int, Piece] | None]:
        """Choice index and piece, as they come; None when ``tick_s`` passed with neither.

        Raises:
            ApiError: a sequence was refused or failed, the time is over, or the server ends.
        """
        open_choices = len(self._sequences)
        while open_choices:
            item = await self._next(tick_s)
            if item is None:
                yield None
                continue
            index, event = item
            piece = self._feed(index, event)
            open_choices -= piece.finish_reason is not None
            if not piece.is_empty:
                yield index, piece

    def interrupt(self, error: ApiError) -> None:
        """End from outside: the reader of `pieces` gets ``error``."""
        self._interruption = self._interruption or error
        with contextlib.suppress(asyncio.QueueFull):  # full: its reader is not waiting
            self._items.put_nowait((0, self._interruption))

    def settle(self, outcome: Outcome, reason: str = "") -> None:
        """Over, one way or another; only the first call acts. Does not wait."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        for task in self._tasks:
            task.cancel()
        now_s, tokens = time.monotonic(), self.usage
        self._metrics.count(outcome)
        self._metrics.generation_tokens.inc(tokens.completion_tokens)
        self._metrics.request_seconds.observe(now_s - self._start_s)
        first_s = self._first_token_s
        _logger.info(
            "request %s request_id=%s prompt_tokens=%d tokens=%d first_token_ms=%s "
            "duration_ms=%d%s",
            "finished" if outcome == "ok" else outcome,
            self.request_id, tokens.prompt_tokens, tokens.completion_tokens,
            "-" if first_s is None else int((first_s - self._start_s) * 1e3),
            int((now_s - self._start_s) * 1e3), f" reason={reason!r}" if reason else "",
        )  # fmt: skip
        self._on_end(self)

    def _engine_id(self, index: int) -> str:
        return f"{self.request_id}-{index}"

    def _feed(self, index: int, event: TokenEvent | ApiError) -> Piece:
        if isinstance(event, ApiError):
            raise event
        if event.finish_reason == "error":
            raise ApiError(f"generation failed: {event.error}", status=500, code="engine_error")
        if event.finish_reason == "abort":
            message = event.error or "the request was aborted by the server"
            raise ApiError(message, status=503, code="aborted")
        choice = self._sequences[index].choice
        if choice.finish_reason is not None:
            return Piece()
        piece = choice.feed(event)
        if piece.finish_reason is not None and event.finish_reason is None:
            # a stop string: the engine would go on
            self._client.finish(self._engine_id(index))
            self._tasks[index].cancel()
        return piece

    async def _next(self, tick_s: float) -> tuple[int, TokenEvent | ApiError] | None:
        """The next item, None after ``tick_s`` without one; interruption and timeout are raised."""
        left_s = self._check_over()
        if not self._items.empty():
            return self._items.get_nowait()
        try:
            return await asyncio.wait_for(self._items.get(), min(tick_s, left_s))
        except asyncio.TimeoutError:
            self._check_over()
            return None

    def _check_over(self) -> float:
        """Seconds that are left."""
        if self._interruption is not None:
            raise self._interruption
        if not self._timeout_s:
            return float("inf")
        left_s = self._start_s + self._timeout_s - time.monotonic()
        if left_s <= 0:
            raise ApiError(
                f"request ran longer than {self._timeout_s:g} s (--request-timeout-s)",
                status=408, code="request_timeout",
            )  # fmt: skip
        return left_s

    async def _pump(self, index: int) -> None:
        """Read one sequence's events into the queue; a full queue makes the engine's bound act."""
        last_s: float | None = None
        is_over = False
        try:
            async with self._slots, contextlib.aclosing(self._events(index)) as events:
                async for event in events:
                    if event.token_id is not None:
                        last_s = self._observe(last_s)
                    is_over = event.finish_reason is not None
                    await self._items.put((index, event))
            if not is_over:
                raise RuntimeError("the engine's events ended without a finish reason")
        except RequestRejectedError as error:
            await self._items.put((index, from_rejection(error)))
        except EngineDeadError as error:
            failure = ApiError(f"engine is down: {error}", status=503, code="engine_dead")
            await self._items.put((index, failure))
        except Exception:
            _logger.exception("request failed request_id=%s", self.request_id)
            failure = ApiError("internal error, see the server's log", status=500, code="internal")
            await self._items.put((index, failure))

    async def _events(self, index: int) -> AsyncGenerator[TokenEvent, None]:
        """One sequence's events. A full queue refuses a request by its first sequence; the others
        belong to a request that is under way, and wait for room.
        """
        item = self._sequences[index]
        while True:
            stream = self._client.generate(self._engine_id(index), item.prompt, item.params)
            try:
                async for event in stream:
                    yield event
                return
            except RequestRejectedError as error:
                if index == 0 or error.status != 429:
                    raise
            finally:
                if isinstance(stream, AsyncGenerator):
                    await stream.aclose()
            await asyncio.sleep(_RETRY_S)

    def _observe(self, last_s: float | None) -> float:
        now_s = time.monotonic()
        if last_s is None:
            self._first_token_s = self._first_token_s or now_s
            self._metrics.time_to_first_token.observe(now_s - self._start_s)
        else:
            self._metrics.token_gap.observe(now_s - last_s)
        return now_s
