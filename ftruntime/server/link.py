"""One engine process and the socket to it: spawn, frames both ways, questions, the end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from ftruntime.engine import messages

_TERM_GRACE_S = 2.0
_EXIT_CODE_WAIT_S = 0.5
# the engine shares the machine with its front; more math threads are the user's choice
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine process is gone or does not answer; tokens of the request are missing."""


class EngineLink:
    """Made and used in one asyncio loop.

    Args:
        on_message: called with every message of the engine that answers no question.
        on_end: called once with a sentence when the engine is gone, before `stop` returns.
    """

    def __init__(
        self,
        on_message: Callable[[messages.EngineMessage], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._queries: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._next_query = 0
        self._stopping = False
        self._end: str | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once started."""
        return None if self._process is None else self._process.pid

    @property
    def end(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        return self._end

    async def start(self, start: messages.Start, env: Mapping[str, str]) -> None:
        """Spawn the engine, with `env` on top of our environment, and send it `start`."""
        if self._process is not None:
            raise RuntimeError("the engine is started already, expected one start")
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            # a session of its own: an interrupt at the terminal reaches the front only
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ftruntime.engine.process", "--fd", str(fd)],
                stdin=subprocess.DEVNULL, pass_fds=(fd,), env=_child_env(env),
                start_new_session=True,
            )  # fmt: skip
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self.write(start)
        self._reading = asyncio.create_task(self._read(reader), name="engine-link")

    def write(self, message: messages.FrontMessage) -> None:
        """Send; without effect on an engine that is gone.

        Never waits: frames are small, and an abort must go out from a cancelled task.
        """
        if self._end is None and self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.frame(message))

    def require_alive(self) -> None:
        """
        Raises:
            EngineDeadError: not started, or gone.
        """
        if self._end is not None:
            raise EngineDeadError(self._end)
        if self._writer is None:
            raise EngineDeadError("the engine is not started")

    async def ask(
        self, question: Callable[[int], messages.FrontMessage], timeout_s: float | None
    ) -> dict[str, object]:
        """The engine's answer to `question(query_id)`; `timeout_s=None` waits while it lives.

        Raises:
            EngineDeadError: the engine is gone, or there was no answer in time.
        """
        self.require_alive()
        query_id, self._next_query = self._next_query, self._next_query + 1
        answer: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        self.write(question(query_id))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError as error:
            raise EngineDeadError(f"the engine did not answer within {timeout_s} s") from error
        finally:
            self._queries.pop(query_id, None)

    def die(self, detail: str) -> None:
        """The engine is of no use any more; only the first call acts."""
        if self._end is not None:
            return
        self._end = detail
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(detail))
        self._on_end(detail)

    def kill(self, detail: str) -> None:
        """End an engine that cannot be asked any more."""
        if self._process is not None:
            self._process.kill()
        self.die(detail)

    async def stop(self, timeout_s: float) -> None:
        """End the engine: ask, after `timeout_s` terminate, then kill. No process is left."""
        process = self._process
        if process is None:
            return
        self._stopping = True
        self.write(messages.Shutdown())
        if not await _ended(process, timeout_s):
            _logger.warning(
                "engine does not end pid=%d waited_s=%.1f action=terminate", process.pid, timeout_s
            )
            process.terminate()
            if not await _ended(process, _TERM_GRACE_S):
                process.kill()
                await _ended(process, float("inf"))
        self.die("the engine was stopped")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await messages.read(reader)) is not None:
            if isinstance(message, messages.StatsReply):
                self._answer(message.query_id, message.stats)
            elif isinstance(message, messages.StepsReply):
                self._answer(message.query_id, message.steps)
            else:
                self._on_message(message)
        await self._bury()

    def _answer(self, query_id: int, reply: dict[str, object]) -> None:
        answer = self._queries.get(query_id)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    async def _bury(self) -> None:
        """The socket has ended: learn how the process did, then tell everyone who waits."""
        process = self._process
        ended = process is not None and await _ended(process, _EXIT_CODE_WAIT_S)
        if self._stopping:
            self.die("the engine was stopped")
        code = f" with exit code {process.returncode}" if process is not None and ended else ""
        self.die(f"the engine process ended{code}")


def _child_env(env: Mapping[str, str]) -> dict[str, str]:
    child = dict(os.environ)
    for name in _THREAD_VARIABLES:
        child.setdefault(name, "1")
    child.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # its errors come to us as exceptions
    return child | dict(env)


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the process without a thread that an interrupted loop would have to join."""
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(0.01)
    return True
