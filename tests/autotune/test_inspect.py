"""How `inspect` gets its rows: through the tuner's workers, in the order of the work.

Mutants tried: rows in the order in which they come, errors of the compiler let through, a machine
that failed let through by the command, the first item alone done, what Triton prints let
through.
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from triton.runtime.errors import PTXASError

from autotune import inspect
from autotune.cli import cli
from autotune.inspect import Item
from autotune.workers import Stopped
from ftkernels import backend

WORK = [Item("a", {"name": "one", "T": 1}), Item("b", {"T": 2}), Item("c", {"T": 3})]


def test_rows_stand_in_the_order_of_the_work(monkeypatch):
    def backwards(jobs, work, done, *, num_workers, name):
        assert num_workers == 3
        assert [name(job) for job in jobs] == ["a (name=one T=1)", "b (T=2)", "c (T=3)"]
        for job in reversed(jobs):
            done(job, work(job))

    monkeypatch.setattr(inspect, "work_through", backwards)
    monkeypatch.setattr(inspect, "rows_of", lambda item, arch: [(item.case["T"], arch)] * 2)
    told: list[str] = []
    rows = inspect.inspect(WORK, arch=90, advance=told.append, jobs=3)
    assert rows == [(1, 90), (1, 90), (2, 90), (2, 90), (3, 90), (3, 90)]
    assert told == ["c", "b", "a"]


ERRORS = {
    "no tool": RuntimeError("Cannot find ptxas"),
    "no space": OSError(28, "No space left on device"),
    "refused": PTXASError("`ptxas` failed with error code 255\nptxas error: too much\n"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_what_cannot_be_compiled_is_one_sentence(error, monkeypatch):
    def rows_of(item: Item, arch: int) -> None:
        print("the whole code")
        raise error

    monkeypatch.setattr(inspect, "rows_of", rows_of)
    start = rf"^a \(name=one T=1\) cannot be compiled: {type(error).__name__}: "
    with pytest.raises(Stopped, match=start) as ended:
        inspect.inspect(WORK, arch=89, advance=pytest.fail, jobs=1)
    assert "\n" not in str(ended.value)
    if backend.interpreted():
        return
    found = CliRunner().invoke(cli, ["inspect", "count_missing", "--jobs", "1"])
    assert (found.exit_code, found.stdout) == (1, "")
    assert "count_missing (" in found.stderr.splitlines()[-1]
    assert f"cannot be compiled: {type(error).__name__}: " in found.stderr.splitlines()[-1]


def test_a_killed_worker_is_one_sentence(monkeypatch):
    def killed(jobs, work, done, *, num_workers, name):
        raise Stopped(f"a process at work on one of {name(jobs[0])} was killed")

    monkeypatch.setattr(inspect, "work_through", killed)
    if backend.interpreted():
        return
    found = CliRunner().invoke(cli, ["inspect", "count_missing"])
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.strip().startswith("Error: a process at work on one of count_missing (")
