"""The engine as a process of its own: `python -m ftruntime.engine.process --fd N`.

The socket behind `fd` carries the messages of `messages.py`. A reader thread owns the inbox and
answers questions while a step runs; the main thread builds the engine and steps it. The end of the
socket means that the front died: the engine ends quietly.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping

from ftruntime import log
from ftruntime.engine import messages
from ftruntime.engine.collect import fewer_collections
from ftruntime.engine.loop import EngineLoop
from ftruntime.progress import phase_name
from ftruntime.types import EngineFailedError, RequestRejectedError, TokenEvent

Progress = Callable[[str, float], None]
OnEnd = Callable[[str], None]
Builder = Callable[[Mapping[str, object], Progress, OnEnd], EngineLoop]

_EXIT_GRACE_S = 1.0  # for the present step, once the front is gone
_KEEP_ALIVE_S = 2.0  # between two of an idle engine
_NO_PLAN_WAIT_S = 0.02
_PROGRESS_STEP = 0.01

_logger = logging.getLogger(__name__)


def build_from_config(
    config: Mapping[str, object], progress: Progress, on_end: OnEnd = lambda text: None
) -> EngineLoop:
    """The builder of `serve`: the fields of a `RuntimeConfig` become an engine."""
    from ftruntime.config import RuntimeConfig
    from ftruntime.engine.build import build_engine

    return build_engine(RuntimeConfig.from_dict(config), progress, on_end=on_end)


def load_builder(name: str) -> Builder:
    """The function named `module:function`.

    Raises:
        ValueError: the name has another form, or nothing callable stands there.
    """
    module_name, _, function_name = name.partition(":")
    builder = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(builder):
        raise ValueError(f"builder is {name!r}, expected module:function naming a function")
    return builder  # type: ignore[no-any-return]


class _FrontGoneError(Exception):
    """The socket is closed at the other end."""


class _Channel:
    """Sends from several threads, one whole frame at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: messages.EngineMessage) -> None:
        data = messages.frame(message)
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError as error:
            raise _FrontGoneError from error

    def receive(self) -> messages.FrontMessage | None:
        return messages.receive(self._sock)


class EngineProcess:
    """Serves one front over one socket until it says Shutdown or is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel = _Channel(sock)
        self._inbox: queue.SimpleQueue[messages.FrontMessage] = queue.SimpleQueue()
        self._loop: EngineLoop | None = None
        self._stopping = False
        self._last_phase = ("", -1.0)

    def run(self) -> int:
        """Build, serve, close; the exit status."""
        start = self._channel.receive()
        if not isinstance(start, messages.Start):
            return 0 if start is None else 2
        log.setup(start.log_level)
        threading.Thread(target=self._read, name="inbox", daemon=True).start()
        try:
            loop = self._build(start)
            if loop is None:
                return 1
            return self._run(loop)
        except _FrontGoneError:
            _logger.debug("front gone")
        return 0

    def _run(self, loop: EngineLoop) -> int:
        try:
            with fewer_collections():
                self._serve(loop)
        except EngineFailedError as error:
            self._tell(str(error))  # before what is closed has its time to end
            return 1
        finally:
            loop.close()
        return 0

    def _fail(self, text: str) -> None:
        """The engine cannot go on, whatever its main thread is at; from any thread."""
        self._tell(text)
        logging.shutdown()
        os._exit(1)

    def _tell(self, text: str) -> None:
        _logger.error("engine ends: %s", text)
        with contextlib.suppress(_FrontGoneError):
            self._channel.send(messages.Failed(text))

    def _build(self, start: messages.Start) -> EngineLoop | None:
        try:
            loop = load_builder(start.builder)(start.config, self._progress, self._fail)
        except _FrontGoneError:
            raise
        except Exception as error:
            # settings and checkpoints are refused with one sentence; the rest are bugs
            expected = isinstance(error, ValueError | OSError | MemoryError | EngineFailedError)
            text = str(error) if expected else f"{type(error).__name__}: {error}"
            if not expected:
                _logger.exception("engine start failed")
            self._channel.send(messages.Failed(text))
            return None
        self._loop = loop
        self._channel.send(messages.Ready(loop.info))
        return loop

    def _progress(self, phase: str, progress: float) -> None:
        last_phase, last_progress = self._last_phase
        same = phase_name(phase) == phase_name(last_phase)
        if same and progress < 1.0 and progress - last_progress < _PROGRESS_STEP:
            return
        self._last_phase = (phase, progress)
        self._channel.send(messages.Phase(phase, progress))

    def _serve(self, loop: EngineLoop) -> None:
        progressed = True
        while not self._stopping:
            if not loop.has_work:
                loop.idle()
                if not self._handle_within(loop, _KEEP_ALIVE_S):
                    loop.keep_alive()
            elif not progressed:
                self._handle_within(loop, _NO_PLAN_WAIT_S)
            while not self._inbox.empty():
                self._handle(loop, self._inbox.get())
            if self._stopping or not loop.has_work:
                continue
            before = loop.num_steps
            self._send_events(loop.step())
            progressed = loop.num_steps > before

    def _handle_within(self, loop: EngineLoop, timeout_s: float) -> bool:
        """Whether there was a message."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self._handle(loop, message)
        return True

    def _handle(self, loop: EngineLoop, message: messages.FrontMessage) -> None:
        if isinstance(message, messages.Submit):
            self._submit(loop, message)
        elif isinstance(message, messages.Cancel):
            event = loop.cancel(message.request_id, aborted=message.aborted)
            self._send_events([] if event is None else [event])
        elif isinstance(message, messages.Shutdown):
            self._stopping = True

    def _submit(self, loop: EngineLoop, message: messages.Submit) -> None:
        request = dataclasses.replace(message.request, arrival_s=loop.clock.now())
        try:
            loop.submit(request)
        except RequestRejectedError as error:
            reply = messages.Rejected(request.request_id, str(error), error.code, error.status)
            self._channel.send(reply)

    def _send_events(self, events: list[TokenEvent]) -> None:
        if events:
            self._channel.send(messages.Events(events))

    def _read(self) -> None:
        """Reader thread: answers questions at once, queues the rest, ends with the front."""
        try:
            while (message := self._channel.receive()) is not None:
                if isinstance(message, messages.StatsQuery | messages.StepsQuery):
                    self._answer(message)
                else:
                    self._inbox.put(message)
        except _FrontGoneError:
            pass
        self._inbox.put(messages.Shutdown())
        time.sleep(_EXIT_GRACE_S)
        # the present step or a load still runs, for nobody
        os._exit(0)

    def _answer(self, query: messages.StatsQuery | messages.StepsQuery) -> None:
        loop = self._loop
        if isinstance(query, messages.StatsQuery):
            self._channel.send(messages.StatsReply(query.query_id, self._stats(loop)))
        else:
            steps = {"steps": [], "next": 0} if loop is None else loop.steps(query.since)
            self._channel.send(messages.StepsReply(query.query_id, steps))

    def _stats(self, loop: EngineLoop | None) -> dict[str, object]:
        try:
            return {} if loop is None else loop.stats()
        # a broken counter must not take the reader, and so the whole engine, with it
        except Exception as error:
            _logger.exception("stats failed")
            return {"error": f"{type(error).__name__}: {error}"}


def main(argv: list[str] | None = None) -> int:
    """Entry point; an interrupt at the terminal is the front's business."""
    parser = argparse.ArgumentParser(prog="ftruntime.engine.process")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the front")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=args.fd) as sock:
        return EngineProcess(sock).run()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # nothing is left to save, and taking torch apart in order would keep the front waiting
    os._exit(status)
