"""Runs the front until a signal ends it: first the port, then the engine, requests, a drain."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from types import FrameType

import uvicorn

from ftruntime.config import RuntimeConfig, served_name
from ftruntime.server.app import create_app
from ftruntime.server.client import EngineClient
from ftruntime.server.front import Front, ServerSettings
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer

EXIT_OK, EXIT_FAILED = 0, 1
_BACKLOG = 2048
_CLOSE_S = 5
_DRAIN_POLL_S = 0.02

_logger = logging.getLogger(__name__)


def claim_port(host: str, port: int) -> socket.socket:
    """A listening socket, so that nobody else can take the port while the model loads.

    Args:
        host: address or name to listen on.
        port: TCP port; 0 lets the system choose.

    Raises:
        OSError: with one sentence that names the flag and its value.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OSError(
            f"--host is {host!r}, expected an address of this machine ({error.strerror})"
        ) from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(_bind_sentence(host, port, error)) from error
    return listener


def settings_from(config: RuntimeConfig) -> ServerSettings:
    """The front's share of the settings; a model without a name is called after its directory."""
    return ServerSettings(
        served_model_name=served_name(config),
        api_key=config.api_key,
        max_body_bytes=int(config.max_body_mb * (1 << 20)),
        request_timeout_s=config.request_timeout_s,
        shutdown_timeout_s=config.shutdown_timeout_s,
        enable_cache_report=config.enable_cache_report,
    )


def run_server(
    config: RuntimeConfig,
    client: EngineClient,
    tokenizer: Tokenizer,
    chat: ChatFormat,
    *,
    listener: socket.socket | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit status.

    The first signal drains: new requests get 503, running ones have ``shutdown_timeout_s``. A
    second one aborts them.

    Args:
        config: of the server; ``host`` and ``port`` are claimed here unless ``listener`` is given.
        client: not started.
        tokenizer, chat: of the checkpoint.
        listener: from `claim_port`.

    Returns:
        0 after a signal; 1 with one sentence on stderr if the port is taken or the engine could not
        start.
    """
    try:
        listener = listener or claim_port(config.host, config.port)
    except OSError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return asyncio.run(_serve(settings_from(config), client, tokenizer, chat, listener))


async def _serve(
    settings: ServerSettings,
    client: EngineClient,
    tokenizer: Tokenizer,
    chat: ChatFormat,
    listener: socket.socket,
) -> int:
    failures: list[str] = []

    def fail(sentence: str) -> None:
        failures.append(sentence)
        server.should_exit = True

    app = create_app(client, tokenizer, chat, settings, on_failure=fail)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", backlog=_BACKLOG,
        timeout_graceful_shutdown=_CLOSE_S,
    )  # fmt: skip
    server = DrainingServer(config, app.state.front, settings.shutdown_timeout_s)
    host, port = listener.getsockname()[:2]
    _logger.info("server listening url=http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await server.serve(sockets=[listener])
    for sentence in failures:
        print(sentence, file=sys.stderr)
    return EXIT_FAILED if failures else EXIT_OK


class DrainingServer(uvicorn.Server):
    """A uvicorn server whose first signal drains and whose second one aborts."""

    def __init__(self, config: uvicorn.Config, front: Front, drain_s: float) -> None:
        super().__init__(config)
        self._front = front
        self._drain_s = drain_s
        self._drain: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler; uvicorn's own would stop listening at once, and end by the signal."""
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Begin to end, or end at once when already ending."""
        front = self._front
        if front.draining:
            _logger.warning("shutdown now running=%d", len(front.running))
            front.abort_all("the server is shutting down at once")
            return
        front.draining = True
        _logger.info("shutdown begins running=%d timeout_s=%g", len(front.running), self._drain_s)
        self._drain = asyncio.ensure_future(self._finish())

    async def _finish(self) -> None:
        try:
            await asyncio.wait_for(self._idle(), self._drain_s)
        except asyncio.TimeoutError:
            running = len(self._front.running)
            _logger.warning("shutdown timeout running=%d action=abort", running)
            self._front.abort_all(
                f"the server is shutting down and waited {self._drain_s:g} s (--shutdown-timeout-s)"
            )
        self.should_exit = True

    async def _idle(self) -> None:
        while self._front.running:
            await asyncio.sleep(_DRAIN_POLL_S)


def _bind_sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port is {port}, already in use on {host}, expected a free port"
    if error.errno == errno.EACCES:
        return f"--port is {port}, not permitted, expected a port from 1024 up"
    return f"--host is {host!r} with --port {port}, cannot listen there ({error.strerror})"
