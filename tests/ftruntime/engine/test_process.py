"""The engine process, spoken to over its socket by a front written here.

Mutants that these tests catch: questions answered by the step thread; end of the socket ignored, or
waiting for the step; SIGINT not ignored; a trace for a refused setting; an idle loop that polls; a
rejection that is not sent.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from ftruntime.engine import messages
from ftruntime.engine.process import load_builder
from ftruntime.types import Request, SamplingParams, TokenEvent, TokenLogprobs
from tests.ftruntime.engine.fake_engine import KILL, SLEEP, expected_tokens

ROOT = Path(__file__).parents[3]
BUILDER = "tests.ftruntime.engine.fake_engine:build"


@dataclass
class Front:
    sock: socket.socket
    process: subprocess.Popen[str]

    def send(self, message: messages.FrontMessage) -> None:
        self.sock.sendall(messages.frame(message))

    def receive(self) -> messages.EngineMessage | None:
        head = self.sock.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return None
        body = self.sock.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
        return msgspec.msgpack.decode(body, type=messages.EngineMessage)

    def until(self, kind: type) -> list[messages.EngineMessage]:
        """All messages up to the first of `kind`."""
        got: list[messages.EngineMessage] = []
        while not got or not isinstance(got[-1], kind):
            message = self.receive()
            assert message is not None, f"the engine left before a {kind.__name__}: {got}"
            got.append(message)
        return got

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=1, logit_bias={3: 1.5}, stop="x")
        self.send(messages.Submit(Request(name, prompt, params, arrival_s=-1.0)))

    def ends(self, within_s: float) -> int:
        """Exit code; fails when the process outlives the limit."""
        return self.process.wait(within_s)


@contextmanager
def engine(builder: str = BUILDER, **config: object) -> Iterator[Front]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20.0)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "ftruntime.engine.process", "--fd", str(theirs.fileno())],
        pass_fds=(theirs.fileno(),), env=env, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    theirs.close()
    front = Front(ours, process)
    try:
        front.send(messages.Start(config, builder))
        yield front
    finally:
        ours.close()
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_a_request_from_start_to_shutdown() -> None:
    with engine() as front:
        start = front.until(messages.Ready)
        assert start[0] == messages.Phase("weights", 0.5)
        assert isinstance(start[-1], messages.Ready)
        assert start[-1].info["max_model_len"] == 8192
        front.submit("a", (1, 2, 3), 6)
        events: list[TokenEvent] = []
        while not events or events[-1].finish_reason is None:
            reply = front.until(messages.Events)[-1]
            assert isinstance(reply, messages.Events)
            events += reply.events
        assert [e.token_id for e in events] == expected_tokens([1, 2, 3], 6)
        assert events[-1].finish_reason == "length"
        front.send(messages.StepsQuery(7, 1))
        steps = front.until(messages.StepsReply)[-1]
        assert isinstance(steps, messages.StepsReply)
        assert steps.query_id == 7
        assert [s["index"] for s in steps.steps["steps"]] == [1, 2, 3, 4, 5]
        front.send(messages.Shutdown())
        assert front.ends(5.0) == 0


def test_s12_questions_are_answered_while_a_step_is_stuck() -> None:
    with engine() as front:
        front.until(messages.Ready)
        front.submit("a", (SLEEP,), 6)
        deadline = time.monotonic() + 10.0
        running_s = 0.0
        while running_s < 0.2 and time.monotonic() < deadline:
            front.send(messages.StatsQuery(1))
            reply = front.until(messages.StatsReply)[-1]
            assert isinstance(reply, messages.StatsReply)
            running_s = float(str(reply.stats["running_step_s"]))
            time.sleep(0.02)
        assert running_s >= 0.2
        front.send(messages.StepsQuery(2, 0))
        assert front.until(messages.StepsReply)[-1] == messages.StepsReply(
            2, {"steps": [], "next": 0}
        )


@pytest.mark.parametrize("prompt", [(), (1, 2), (SLEEP,)], ids=["idle", "busy", "stuck"])
def test_the_front_dying_ends_the_engine_quietly(prompt: tuple[int, ...]) -> None:
    with engine(step_s=0.002) as front:
        front.until(messages.Ready)
        if prompt:
            front.submit("a", prompt, 5000)
            time.sleep(0.1)
        front.sock.close()
        assert front.ends(2.0) == 0
        assert front.process.stderr is not None
        assert "Traceback" not in front.process.stderr.read()


def test_the_front_dying_ends_a_load() -> None:
    with engine(load_s=60.0) as front:
        front.until(messages.Phase)
        front.sock.close()
        assert front.ends(2.0) == 0


def test_a_refused_setting_is_one_sentence() -> None:
    with engine(error="--num-tokens is 100, expected a multiple of 128") as front:
        message = front.until(messages.Failed)[-1]
        assert message == messages.Failed("--num-tokens is 100, expected a multiple of 128")
        assert front.ends(5.0) == 1
        assert front.process.stderr is not None
        assert "Traceback" not in front.process.stderr.read()


def test_an_unknown_builder_fails_the_start() -> None:
    with engine(builder="tests.ftruntime.engine.fake_engine:nothing") as front:
        message = front.until(messages.Failed)[-1]
        assert message == messages.Failed(
            "builder is 'tests.ftruntime.engine.fake_engine:nothing', "
            "expected module:function naming a function"
        )


def test_rejections_carry_code_and_status() -> None:
    with engine(running=1, max_waiting=1, step_s=0.01) as front:
        front.until(messages.Ready)
        front.submit("long", tuple(range(500)) * 20, 1)
        first = front.until(messages.Rejected)[-1]
        assert isinstance(first, messages.Rejected)
        assert (first.request_id, first.code, first.status) == (
            "long", "context_length_exceeded", 400,
        )  # fmt: skip
        for name in ("a", "b", "c", "d"):
            front.submit(name, (1, 2), 1000)
        second = front.until(messages.Rejected)[-1]
        assert isinstance(second, messages.Rejected)
        assert (second.code, second.status) == ("queue_full", 429)


def test_an_interrupt_at_the_terminal_is_ignored() -> None:
    with engine() as front:
        front.until(messages.Ready)
        front.process.send_signal(signal.SIGINT)
        front.submit("a", (1, 2, 3), 1)
        assert front.until(messages.Events)


def test_an_idle_engine_sleeps() -> None:
    with engine() as front:
        front.until(messages.Ready)
        front.submit("a", (1, 2, 3), 3)
        front.until(messages.Events)
        time.sleep(0.2)
        before = _wake_ups(front.process.pid)
        time.sleep(1.0)
        assert _wake_ups(front.process.pid) - before <= 5


def test_a_crash_closes_the_socket() -> None:
    with engine() as front:
        front.until(messages.Ready)
        front.submit("a", (KILL,), 3)
        while front.receive() is not None:
            pass
        assert front.ends(2.0) == -signal.SIGKILL


def test_messages_survive_the_wire() -> None:
    event = TokenEvent(
        "r",
        5,
        "stop",
        TokenLogprobs(5, -0.1, ((5, -0.1), (6, -2.0))),
        (TokenLogprobs(1, -3.0),),
        128,
    )
    for message in (messages.Events([event]), messages.Rejected("r", "no", "queue_full", 429)):
        body = messages.frame(message)
        assert int.from_bytes(body[:4], "little") == len(body) - 4
        assert msgspec.msgpack.decode(body[4:], type=messages.EngineMessage) == message


def test_load_builder_names_the_bad_value() -> None:
    with pytest.raises(ValueError, match="builder is 'os:sep', expected module:function"):
        load_builder("os:sep")


def _wake_ups(pid: int) -> int:
    """How often the process's threads went to sleep so far."""
    lines = [
        line
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches:")
    ]
    assert lines
    return sum(int(line.split()[1]) for line in lines)
