"""What is said while a search runs: on a terminal a bar, else a line every half minute.

Mutants tried: a line at every step, the time left of the whole run's mean, done counted as left, a
gain on an unsound default told, what is not expected any more still waited for, a state refused
that need not be kept, the default one in the home folder of whoever runs the tests.
"""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace

import click
import pytest
from rich.console import Console
from rich.progress import Progress

from autotune import progress, static
from autotune import search as searching
from autotune.progress import Steps
from autotune.search import Launch, Trial
from autotune.state import State
from autotune.trials import Job
from autotune.workers import Stopped
from ftkernels import registry


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _steps(clock: Clock, total: int, *, terminal: bool = False) -> tuple[Steps, io.StringIO]:
    said = io.StringIO()
    console = Console(
        file=said, force_terminal=terminal, force_interactive=terminal, width=60
    )  # fmt: skip
    bar = Progress(console=console)
    return Steps(bar, "compile", total, clock), said


def test_a_line_every_half_minute_says_what_is_left(clock):
    steps, said = _steps(clock, 40)
    for _ in range(10):  # known from a run before, in no time
        steps.advance("rms_norm")
    for second in range(1, 61):
        clock.now = 100.0 + second
        if second % 10 == 0:
            steps.note = f"{second} dropped"
            steps.advance("linear")
    # 13 done of which 13 in the first half minute, 27 left; then 3 in the next, 24 left
    assert said.getvalue().splitlines() == [
        "compile linear: 13 of 40, 30 dropped, 62 s left",
        "compile linear: 16 of 40, 60 dropped, 4 min left",
    ]


def test_fewer_steps_are_expected_later(clock):
    steps, said = _steps(clock, 1000)
    steps.expect(3)
    steps.advance("linear")
    clock.now += 40
    steps.advance("linear")
    assert said.getvalue() == "compile linear: 2 of 3, 20 s left\n"


def test_more_steps_than_expected_are_counted(clock):
    steps, said = _steps(clock, 1)
    steps.advance("linear")
    clock.now += 40
    steps.advance("linear")
    assert said.getvalue() == "compile linear: 2 of 2, 0 s left\n"


def test_a_terminal_has_a_bar_and_no_lines(clock):
    steps, said = _steps(clock, 3, terminal=True)
    clock.now += 40
    steps.advance("linear")
    assert said.getvalue() == ""


def _problem() -> searching.Problem:
    spec = next(x for x in registry() if x.name == "swiglu_clamp")
    return searching.problems([spec], arch=89)[0]


def _noted(*trials: Trial) -> str:
    steps, _ = _steps(Clock(), len(trials))
    advance = progress._watched(steps)
    problem = _problem()
    for record, trial in zip(problem.candidates, trials, strict=False):
        advance(Job(problem.op, problem.key, record, problem.users, 89, static.score, ""), trial)
    return steps.note


def test_what_is_dropped_and_the_best_gain_are_told():
    failed = Trial(error="does not compile")
    assert _noted(Trial((10.0,)), failed, Trial((7.5,)), Trial((8.0,))) == (
        "1 dropped, best -25% swiglu_clamp"
    )
    launch = Launch("k", 255, 8, 0, 8, True, None, 0, 0.0)
    spilled, sound = Trial((10.0,), (launch,)), Trial((7.5,), (replace(launch, spill_bytes=0),))
    assert _noted(spilled, failed, sound) == "2 dropped, best -"


@pytest.mark.parametrize("state", ["kept.jsonl", None, "/dev/null"], ids=str)
def test_a_failure_of_the_machine_is_one_sentence(state, tmp_path):
    path = None if state is None else tmp_path / state
    with (
        pytest.raises(click.ClickException) as end,
        progress.compiling([], 89, path, 1),
    ):  # fmt: skip
        raise Stopped("linear cannot be compiled")
    goes_on = f"; the same command goes on from what {path} holds"
    is_kept = state == "kept.jsonl"
    assert end.value.message == f"linear cannot be compiled{goes_on * is_kept}"
    assert end.value.exit_code == 1


def test_tests_keep_no_state_where_their_user_does(home, tmp_path_factory):
    for state in (progress.state_file("card"), home):
        assert state.is_relative_to(tmp_path_factory.getbasetemp())
    command = "from autotune.progress import state_file; print(state_file('card'))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stdout == f"{progress.state_file('card')}\n"


def test_a_state_that_another_one_has_is_read_where_it_need_not_be_kept(tmp_path):
    other = State(tmp_path / "s", pytest.fail)
    other.put("a", Trial((1.0,)))
    with progress.compiling([], 89, tmp_path / "s", 1, must_keep=False) as setup:
        assert set(setup.state.known) == {"a"}
        setup.state.put("b", Trial((1.0,)))
    with pytest.raises(click.UsageError), progress.compiling([], 89, tmp_path / "s", 1):
        pass
    with (
        pytest.raises(click.ClickException) as end,
        progress.compiling([], 89, tmp_path / "s", 1, must_keep=False),
    ):  # fmt: skip
        raise Stopped("linear cannot be compiled")
    assert end.value.message == "linear cannot be compiled"
    other.close()
    assert set(State(tmp_path / "s", pytest.fail).known) == {"a"}
