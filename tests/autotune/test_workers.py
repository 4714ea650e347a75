"""Processes that work: what they give, and that none outlives what started it.

Mutants tried: more jobs under way than processes, a result lost beside a failure, workers that go
on after a failure or without their parent, Ctrl-C and SIGTERM seen by a worker, the death of a
worker let through as it comes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.workers import Stopped, work_through

ROOT = Path(__file__).parents[2]
_LONG_S = 60.0
_SOON_S = 10.0


def square(number: int) -> int:
    return number * number


def note_and_wait(folder: Path) -> None:
    """Leave the number of this process in a file, then take long."""
    (folder / str(os.getpid())).touch()
    time.sleep(_LONG_S)


def signal_itself(number: int) -> int:
    os.kill(os.getpid(), number)
    return number


def fail_or_wait(job: tuple[str, Path]) -> str:
    """One job fails once another is under way."""
    name, folder = job
    (folder / name).touch()
    if name == "long":
        time.sleep(_LONG_S)
    if name == "bad":
        _await(lambda: (folder / "long").exists())
        raise KeyError(name)
    return name


def fail_at_a_mark(job: tuple[str, Path]) -> str:
    """One job is done at once, the others once it is known; one of them fails."""
    name, folder = job
    if name != "first":
        _await(lambda: (folder / "known").exists())
    if name == "bad":
        raise KeyError(name)
    return name


def _await(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _SOON_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def _run(jobs, work, num_workers: int = 2) -> dict:
    got = {}
    work_through(jobs, work, got.__setitem__, num_workers=num_workers, name=str)
    return got


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_job_is_done(num_workers, count):
    jobs = list(range(count))
    assert _run(jobs, square, num_workers) == {number: number**2 for number in jobs}


def test_a_failure_ends_what_is_under_way(tmp_path):
    start = time.monotonic()
    with pytest.raises(KeyError):
        _run([("long", tmp_path), ("bad", tmp_path), ("never", tmp_path)], fail_or_wait)
    assert time.monotonic() - start < _LONG_S / 2
    assert not (tmp_path / "never").exists()


def test_results_beside_a_failure_are_not_lost(tmp_path):
    got = set()

    def done(job: tuple[str, Path], name: str) -> None:
        got.add(name)
        if name == "first":
            (tmp_path / "known").touch()
            time.sleep(1.0)  # in which all others end

    jobs = [(name, tmp_path) for name in ("bad", "a", "b", "c", "first")]
    with pytest.raises(KeyError):
        work_through(jobs, fail_at_a_mark, done, num_workers=5, name=str)
    assert got == {"first", "a", "b", "c"}


def test_a_killed_process_is_one_sentence_that_names_what_was_under_way():
    jobs = [signal.SIGKILL, signal.SIGINT, *[0] * 5]
    with pytest.raises(Stopped, match=r"^a process at work on one of .* was killed \(") as end:
        work_through(jobs, signal_itself, lambda *_: None, num_workers=2, name=lambda x: f"<{x:d}>")
    named = str(end.value).split("one of ")[1].split(" was")[0]
    assert "<9>" in named
    assert named.count("<") <= 2


def test_workers_leave_signals_to_their_parent():
    jobs = [signal.SIGINT, signal.SIGTERM]
    assert _run(jobs, signal_itself) == {number: number for number in jobs}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(number, tmp_path):
    script = (
        "from pathlib import Path\n"
        "from autotune.workers import work_through\n"
        "from tests.autotune.test_workers import note_and_wait\n"
        "if __name__ == '__main__':\n"
        f"    jobs = [Path({str(tmp_path)!r})] * 2\n"
        "    work_through(jobs, note_and_wait, print, num_workers=2, name=str)\n"
    )
    file = tmp_path / "parent.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, str(file)], env=environment, stderr=subprocess.DEVNULL
    )  # fmt: skip
    _await(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2)
    parent.send_signal(number)
    parent.wait(_SOON_S)
    _await(lambda: not any(_runs(path.name) for path in tmp_path.glob("[0-9]*")))


def _runs(pid: str) -> bool:
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
