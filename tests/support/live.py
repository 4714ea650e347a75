"""A real `ftruntime serve` process and what tests ask of it.

Fixtures stand at the end; tests import the ones they use through `tests/e2e/conftest.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
MODEL = "demo"
START_S = 120.0
Json = dict[str, Any]


def free_port(after: int | None = None) -> int:
    """A port that is free now; with `after`, the one next to it if that is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0 if after is None else after + 1))
        except OSError:
            return free_port()
        return int(probe.getsockname()[1])


@dataclass
class Live:
    """One server process; `health_seen` is what `/health` said while it started."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    health_seen: list[tuple[int, Json]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120
        )

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Poll `/health` until 200, keeping every answer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            with contextlib.suppress(httpx.TransportError):
                answer = self.http.get("/health", timeout=5)
                self.health_seen.append((answer.status_code, answer.json()))
                if answer.status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.log()}")

    def post(self, path: str, body: object, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def complete(self, prompt: str | Sequence[int], max_tokens: int, **fields: Any) -> Json:
        """A greedy text completion of exactly `max_tokens` tokens; the choice and the usage."""
        answer = self.post("/v1/completions", greedy(prompt, max_tokens, **fields))
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return {**body["choices"][0], "usage": body["usage"]}

    def stats(self) -> Json:
        return dict(self.http.get("/v1/stats").json())

    def steps(self, since: int = 0) -> list[Json]:
        return list(self.http.get("/v1/steps", params={"since": since}).json()["steps"])

    def next_step(self) -> int:
        return int(self.http.get("/v1/steps", params={"since": 10**15}).json()["next"])

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_log(self, pattern: str, *, after: int = 0, timeout_s: float = 10) -> re.Match[str]:
        """The first match behind character `after` of the log."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            match = re.search(pattern, self.log()[after:])
            found.extend([match] if match else [])
            return match is not None

        until(look, timeout_s, f"no {pattern!r} in the log")
        return found[0]

    def wait_idle(self, timeout_s: float = 30) -> Json:
        """The first stats in which nothing runs or waits; in them every page is free."""
        seen: Json = {}

        def idle() -> bool:
            seen.update(self.stats())
            return seen["num_running"] == 0 and seen["num_waiting"] == 0

        until(idle, timeout_s, "requests still run")
        assert (seen["used_pages"], seen["used_window_pages"]) == (0, 0), seen
        assert seen["integrity"] == "ok", seen
        return seen

    def engine_pids(self) -> list[int]:
        return children_of(self.process.pid)

    def stop(self, timeout_s: float = 30) -> int:
        """Terminate and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for pid in [self.process.pid, *self.engine_pids()]:
                os.kill(pid, signal.SIGKILL)
            raise
        finally:
            self.http.close()
            self.openai.close()


def greedy(prompt: str | Sequence[int], max_tokens: int, **fields: Any) -> Json:
    body: Json = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | fields


def until(condition: Callable[[], bool], timeout_s: float, sentence: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{sentence} after {timeout_s} s"
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Process ids whose parent is `pid`, zombies left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(entry.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Stream:
    """A streamed text completion read by a thread of its own."""

    def __init__(self, server: Live, body: Json, *, path: str = "/v1/completions") -> None:
        self._server, self._path = server, path
        self._body = {**body, "stream": True}
        self.status: int | None = None
        self.events: list[Json] = []
        self.times: list[float] = []
        self.failure: Exception | None = None
        self.done = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        url = self._server.url + self._path
        try:
            with httpx.stream("POST", url, json=self._body, timeout=120) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line[6:]))
                        self.times.append(time.monotonic())
        except httpx.TransportError as error:
            self.failure = error

    def wait_events(self, count: int, timeout_s: float = 60) -> None:
        until(lambda: len(self.events) >= count, timeout_s, f"fewer than {count} events")

    def join(self, timeout_s: float = 120) -> Stream:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream does not end"
        return self

    @property
    def errors(self) -> list[Json]:
        return [event["error"] for event in self.events if "error" in event]

    @property
    def choices(self) -> list[Json]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for choice in self.choices)

    def logprobs(self, name: str) -> list[Any]:
        """`tokens`, `token_logprobs` and so on of all chunks."""
        return [
            item
            for choice in self.choices if choice["logprobs"]
            for item in choice["logprobs"][name]
        ]  # fmt: skip


class Launcher:
    """Starts servers of one demo checkpoint, with logs below `root`."""

    def __init__(self, demo: Path, root: Path) -> None:
        self.demo = demo
        self.root = root
        self._spawned: list[Live] = []
        self._stopped: list[int] = []

    def env(self, **extra: str) -> dict[str, str]:
        ours = {
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self.root / "cache"), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        return kept | ours | extra

    def spawn(
        self,
        *flags: str,
        port: int | None = None,
        command: Sequence[str] | None = None,
        with_model: bool = True,
        model: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Live:
        """Start and return at once; `command` stands for `ftruntime serve`, `model` for the demo.

        Without a model `serve` takes the trained demo of the installation.
        """
        port = free_port() if port is None else port
        log_path = self.root / f"server-{len(self._spawned)}.log"
        argv = [*(command or (*cli(), "serve")), *([str(model or self.demo)] if with_model else [])]
        argv += ["--port", str(port), "--served-model-name", MODEL, *flags]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=self.env(**(env or {})), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip
        live = Live(process, port, log_path)
        self._spawned.append(live)
        return live

    def also_kill(self, pids: Sequence[int]) -> None:
        """Processes that a test stops, which then cannot end with their front."""
        self._stopped += pids

    def kill_all(self) -> None:
        """End what a failed test left; an engine ends with its front."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for live in self._spawned:
            if live.process.poll() is None:
                live.process.kill()
                live.process.wait()

    @contextlib.contextmanager
    def serving(self, *flags: str, **kwargs: Any) -> Iterator[Live]:
        """A ready server, stopped at the end however it went."""
        server = self.spawn(*flags, **kwargs)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()


def cli() -> list[str]:
    """The `ftruntime` command of this environment."""
    script = Path(sys.executable).with_name("ftruntime")
    return [str(script)] if script.exists() else [sys.executable, "-m", "ftruntime"]


@pytest.fixture(scope="session")
def launcher(
    demos: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launcher]:
    launcher = Launcher(demos["small"], tmp_path_factory.mktemp("live"))
    yield launcher
    launcher.kill_all()


@pytest.fixture(scope="session")
def server(launcher: Launcher) -> Iterator[Live]:
    """The server most tests share: exact, chunks of one page, no interleaving."""
    with launcher.serving(*MAIN_FLAGS) as live:
        yield live


MAIN_FLAGS = (
    "--numerics", "exact", "--max-prefill-length", "128", "--num-tokens", "16384",
    "--max-running-requests", "4",
)  # fmt: skip
