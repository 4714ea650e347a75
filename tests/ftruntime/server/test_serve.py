"""A real server on a free port: the openai client, signals, the port.

Mutants tried: uvicorn's own signal handler, no wait for running streams, the port claimed after the
engine's start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from ftruntime.config import RuntimeConfig
from ftruntime.server.app import create_app
from ftruntime.server.bridge import EngineDeadError
from ftruntime.server.serve import claim_port, run_server, settings_from
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer
from tests.ftruntime.server.fake_engine import MODEL, FakeEngine, settings

ROOT = Path(__file__).parents[3]
HI = [{"role": "user", "content": "Hi"}]


@dataclass
class Live:
    url: str
    engine: FakeEngine
    client: openai.OpenAI


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer, chat: ChatFormat) -> Iterator[Live]:
    engine = FakeEngine(
        tokenizer, chat, lambda *_: tokenizer.encode("Hello there, sailor."), max_model_len=2048
    )
    app = create_app(engine, tokenizer, chat, settings(api_key="key"))
    listener = claim_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=10) as client:
        yield Live(url, engine, client)
    server.should_exit = True
    thread.join(10)
    assert engine.calls == ["start", "stop"]


def test_openai_models_and_chat(live: Live) -> None:
    assert [model.id for model in live.client.models.list()] == [MODEL]
    assert live.client.models.retrieve(MODEL).id == MODEL
    answer = live.client.chat.completions.create(model=MODEL, messages=HI, seed=1, temperature=0)
    assert answer.choices[0].message.content == "Hello there, sailor."
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 3


def test_h01_openai_stream_with_usage(live: Live) -> None:
    chunks = list(
        live.client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == "Hello there, sailor."


def test_openai_completions_with_logprobs(live: Live) -> None:
    answer = live.client.completions.create(model=MODEL, prompt="Once", logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"


def test_openai_tools(live: Live) -> None:
    script = live.engine.script
    call = (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    live.engine.script = lambda *_: live.engine.tokenizer.encode(call)
    try:
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        answer = live.client.chat.completions.create(model=MODEL, messages=HI, tools=[tool])
    finally:
        live.engine.script = script
    (made,) = answer.choices[0].message.tool_calls or []
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 2})
    followed = live.client.chat.completions.create(
        model=MODEL, tools=[tool],
        messages=[*HI, answer.choices[0].message,
                  {"role": "tool", "tool_call_id": made.id, "content": "4"}],
    )  # fmt: skip
    assert followed.choices[0].finish_reason == "stop"


def test_openai_errors(live: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="model is 'x'"):
        live.client.chat.completions.create(model="x", messages=HI)
    with pytest.raises(openai.BadRequestError, match="temperature is 101"):
        live.client.chat.completions.create(model=MODEL, messages=HI, temperature=101)
    with pytest.raises(openai.AuthenticationError):
        live.client.with_options(api_key="no").models.list()
    live.engine.fail_after = 2
    try:
        with pytest.raises(openai.APIError, match="a step failed"):
            list(live.client.chat.completions.create(model=MODEL, messages=HI, stream=True))
    finally:
        live.engine.fail_after = None


def test_h09_openai_abort_mid_stream(live: Live) -> None:
    live.engine.script, live.engine.pause_s = lambda *_: [70] * 1000, 0.005
    try:
        stream = live.client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        for _, _ in zip(range(5), stream, strict=False):
            pass
        stream.close()
        deadline_s = time.monotonic() + 5
        while live.engine.running and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not live.engine.running
        ((_, tokens),) = live.engine.aborted
        assert 4 <= tokens < 500  # the first of the five chunks has no token
    finally:
        live.engine.pause_s = 0.0
        live.engine.script = lambda *_: live.engine.tokenizer.encode("Hello there, sailor.")
    lines = httpx.get(f"{live.url}/metrics", headers={"Authorization": "Bearer key"}).text
    assert 'ftruntime_requests_total{outcome="aborted"} 1.0' in lines


def test_oversize_body_gets_its_answer(live: Live) -> None:
    response = httpx.post(
        f"{live.url}/v1/completions", content=b"x" * (33 << 20), timeout=20,
        headers={"Authorization": "Bearer key"},
    )  # fmt: skip
    assert response.status_code == 413


def test_a_body_that_says_it_is_oversize_is_answered_before_it_comes(live: Live) -> None:
    url = httpx.URL(live.url)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
    with socket.create_connection((url.host, url.port), timeout=5) as wire:
        wire.sendall(f"{head}Content-Length: {33 << 20}\r\n\r\n".encode())
        assert wire.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_s15_overlapping_streams_all_end(live: Live) -> None:
    with httpx.Client(base_url=live.url, headers={"Authorization": "Bearer key"}) as client:
        texts: list[str] = []

        def ask(usage: bool) -> None:
            body: dict[str, object] = {"messages": HI, "stream": True}
            if usage:
                body["stream_options"] = {"include_usage": True}
            texts.append(client.post("/v1/chat/completions", json=body, timeout=10).text)

        threads = [threading.Thread(target=ask, args=(i == 1,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(texts) == 3
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert not live.engine.running


PROGRAM = """
import sys
from pathlib import Path
from ftruntime import log
from ftruntime.config import RuntimeConfig
from ftruntime.server.serve import claim_port, run_server
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer
from tests.ftruntime.server.fake_engine import FakeEngine
path, drain_s, pause_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
log.setup("info")
tokenizer, chat = Tokenizer.from_dir(path), ChatFormat.from_dir(path)
engine = FakeEngine(tokenizer, chat, lambda *_: [70] * 20, pause_s=pause_s)
listener = claim_port("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
config = RuntimeConfig(shutdown_timeout_s=drain_s)
code = run_server(config, engine, tokenizer, chat, listener=listener)
print("calls", engine.calls, "aborted", len(engine.aborted), flush=True)
sys.exit(code)
"""


@dataclass
class Process:
    """A server process with one running stream."""

    process: subprocess.Popen[str]
    url: str
    text: str = ""
    thread: threading.Thread | None = None

    def stream(self) -> None:
        first = threading.Event()

        def read() -> None:
            body = {"messages": HI, "stream": True}
            url = f"{self.url}/v1/chat/completions"
            with httpx.stream("POST", url, json=body, timeout=20) as response:
                for piece in response.iter_text():
                    self.text += piece
                    first.set()

        self.thread = threading.Thread(target=read, daemon=True)
        self.thread.start()
        assert first.wait(10)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=15)
        if self.thread is not None:
            self.thread.join(5)
        return self.process.returncode, out, err


@pytest.fixture
def spawn(tokenizer_dir: Path) -> Iterator[object]:
    made: list[Process] = []

    def start(drain_s: float, pause_s: float) -> Process:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tokenizer_dir), str(drain_s), str(pause_s)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdout is not None
        port = int(process.stdout.readline())
        made.append(Process(process, f"http://127.0.0.1:{port}"))
        return made[-1]

    yield start
    for item in made:
        if item.process.poll() is None:
            item.process.kill()
            item.process.communicate()


def test_g08_a_signal_drains(spawn) -> None:  # type: ignore[no-untyped-def]
    server = spawn(10, 0.05)
    server.stream()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    with httpx.Client(base_url=server.url) as client:
        response = client.post("/v1/chat/completions", json={"messages": HI})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        health = client.get("/health")
        assert (health.status_code, health.json()["phase"]) == (503, "draining")
    code, out, err = server.end()
    assert code == 0, err
    assert '"finish_reason":"stop"' in server.text
    assert server.text.endswith("data: [DONE]\n\n")
    assert "calls ['start', 'stop'] aborted 0" in out
    assert "shutdown begins running=1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("second", [True, False], ids=["second signal", "timeout"])
def test_g08_a_drain_that_takes_too_long_aborts(spawn, second: bool) -> None:  # type: ignore[no-untyped-def]
    server = spawn(30 if second else 0.2, 0.5)
    server.stream()
    started_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    if second:
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
    code, out, err = server.end()
    assert code == 0, err
    assert time.monotonic() - started_s < 5
    assert "shutting_down" in server.text
    assert server.text.endswith("data: [DONE]\n\n")
    assert "aborted 1" in out
    assert "Traceback" not in err


def test_g06_a_taken_port_is_one_sentence(
    tokenizer: Tokenizer, chat: ChatFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(tokenizer, chat, lambda *_: [])
    with claim_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code = run_server(RuntimeConfig(port=port), engine, tokenizer, chat)
    assert code == 1
    assert capsys.readouterr().err == (
        f"--port is {port}, already in use on 127.0.0.1, expected a free port\n"
    )
    assert engine.calls == []


def test_a_wrong_host_is_one_sentence() -> None:
    with pytest.raises(OSError, match=r"^--host is 'no\.such\.host\.invalid', expected an address"):
        claim_port("no.such.host.invalid", 1919)
    with pytest.raises(OSError, match=r"^--host is '203\.0\.113\.7' with --port 0, cannot listen"):
        claim_port("203.0.113.7", 0)


def test_an_engine_that_cannot_start_ends_the_server(
    tokenizer: Tokenizer, chat: ChatFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(tokenizer, chat, lambda *_: [])
    engine.start_error = EngineDeadError("model.safetensors: tensor embed is missing")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run_server(RuntimeConfig(port=port), engine, tokenizer, chat) == 1
    assert capsys.readouterr().err == "model.safetensors: tensor embed is missing\n"
    assert engine.calls == ["start", "stop"]


def test_settings_from_the_config() -> None:
    made = settings_from(
        RuntimeConfig(model="/models/flash/", max_body_mb=0.5, api_key="k", request_timeout_s=3)
    )
    assert (made.served_model_name, made.max_body_bytes, made.api_key) == ("flash", 1 << 19, "k")
    assert made.request_timeout_s == 3
    named = settings_from(RuntimeConfig(model="/models/flash", served_model_name="mine"))
    assert named.served_model_name == "mine"
