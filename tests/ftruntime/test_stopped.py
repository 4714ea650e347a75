"""Processes that are stopped, on real ones.

Mutants tried and seen red: a sleeping process that counts as stopped, one that is gone that raises,
a clock that does not start anew when the process goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ftruntime.stopped import StoppedFor, is_stopped
from tests.support.live import until


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that sleeps."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        yield process.pid
        process.kill()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid), 5, "it does not stop")


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
    until(lambda: not is_stopped(pid), 5, "it does not go on")


def test_seconds_count_from_the_first_look(pid):
    stopped = StoppedFor(pid)
    assert (is_stopped(pid), stopped.seconds()) == (False, 0)
    stop(pid)
    stopped.seconds()
    time.sleep(0.1)
    assert stopped.seconds() >= 0.1
    go_on(pid)
    assert stopped.seconds() == 0
    stop(pid)
    stopped.seconds()
    # anew: not since the first time
    assert stopped.seconds() < 0.1


def test_a_process_that_is_gone_is_not_stopped():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert not is_stopped(process.pid)
    assert StoppedFor(process.pid).seconds() == 0
