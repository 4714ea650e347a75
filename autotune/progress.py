"""What compiles, with its progress on stderr."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from autotune.search import Choice, Problem, Trial
    from autotune.trials import Job
    from autotune.tune import Card, Setup

_LINE_S = 30.0  # between two lines where no terminal shows a bar


def state_file(gpu: str) -> Path:
    """Where results of a run are kept for the next one."""
    return Path.home() / ".cache" / "ftkernels" / f"tune-{gpu}.jsonl"


class Steps:
    """What is done of what there is to do: a bar, and where no terminal shows it a line at times.

    Args:
        note: more to say, kept up to date by its owner.
        clock: seconds.
    """

    def __init__(
        self, bar: Progress, verb: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bar, self._verb, self._total, self._clock = bar, verb, total, clock
        self._task = bar.add_task(verb, total=total, note="")
        self._done = 0
        self._last = (clock(), 0)
        self.note = ""

    def expect(self, total: int) -> None:
        """There is that much to do."""
        self._total = total
        self._bar.update(self._task, total=total)

    def advance(self, op: str) -> None:
        """One step is done, of the op."""
        self._done += 1
        if self._done > self._total:  # a choice may have to be tried inside other ops
            self.expect(self._done)
        what = f"{self._verb} {op}"
        self._bar.update(self._task, description=what, advance=1, note=self.note)
        now, (then, before) = self._clock(), self._last
        if not self._bar.console.is_interactive and now - then >= _LINE_S:
            left_s = (self._total - self._done) * (now - then) / (self._done - before)
            words = [f"{what}: {self._done} of {self._total}", self.note, _left(left_s)]
            self._bar.console.print(", ".join(filter(None, words)), soft_wrap=True)
            self._last = (now, self._done)


def _left(seconds: float) -> str:
    return f"{seconds:.0f} s left" if seconds < 90 else f"{seconds / 60:.0f} min left"


@contextlib.contextmanager
def steps(verb: str, total: int) -> Iterator[Steps]:
    """Progress of what is done inside."""
    columns = (
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True, highlight=False)
    # where it shows no bar it ends with an empty line
    is_off = not console.is_interactive
    with Progress(*columns, console=console, transient=True, disable=is_off) as bar:
        yield Steps(bar, verb, total)


@contextlib.contextmanager
def counting(verb: str, total: int) -> Iterator[Callable[[str], None]]:
    """A function to be told the name of each op as it is done."""
    with steps(verb, total) as progress:
        yield progress.advance


@contextlib.contextmanager
def compiling(
    found: Sequence[Problem], arch: int, state: Path | None, jobs: int | None, *,
    prune: bool = True, must_keep: bool = True,
) -> Iterator[Setup]:  # fmt: skip
    """A setup that shows trials, those dropped, the best gain and the time left.

    Args:
        state: file of results that need no compile, None for none.
        jobs: processes that compile, None for one a core.
        prune: leave out configs that no figure could make the choice.
        must_keep: otherwise a state that cannot be used, as another process has it, is read and
            left as it is.

    Raises:
        UsageError: the state cannot be used and must be.
        ClickException: the machine failed.
    """
    from autotune import static
    from autotune.state import State
    from autotune.tune import Setup, model_hash
    from autotune.workers import Stopped

    total = sum(len(problem.candidates) for problem in found)
    workers = jobs or os.cpu_count() or 1
    with contextlib.ExitStack() as stack:
        try:
            kept = State(state, lambda sentence: click.echo(f"ft-autotune: {sentence}", err=True))
        except ValueError as error:
            if state is None or must_keep:
                raise click.UsageError(str(error)) from error
            kept, state = State.glance(state), None
        stack.callback(kept.close)
        progress = stack.enter_context(steps("compile", total))
        advance = _watched(progress)
        try:
            yield Setup(
                arch, static.score, model_hash(), kept, workers, prune, advance, progress.expect
            )
        except Stopped as error:
            is_kept = state is not None and str(state) != os.devnull
            goes_on = f"; the same command goes on from what {state} holds" if is_kept else ""
            raise click.ClickException(f"{error}{goes_on}") from error


def _watched(progress: Steps) -> Callable[[Job, Trial], None]:
    """Counts trials, those dropped and the largest gain on a default."""
    from autotune.search import refusal

    defaults: dict[tuple[str, object, int], Trial] = {}
    dropped, best, where = 0, 0.0, "-"

    def advance(job: Job, trial: Trial) -> None:
        nonlocal dropped, best, where
        default = defaults.setdefault((job.op, job.key, len(job.users)), trial)
        if refusal(trial, default):
            dropped += 1
        elif not refusal(default, default) and 1 - sum(trial.us) / sum(default.us) > best:
            best = 1 - sum(trial.us) / sum(default.us)
            where = f"-{best:.0%} {job.op}"
        progress.note = f"{dropped} dropped, best {where}"
        progress.advance(job.op)

    return advance


def measuring(
    choices: Sequence[Choice | None], card: Card
) -> tuple[list[Choice | None], str]:  # fmt: skip
    """Every choice after a card has measured it, up to where the card was lost, and how it was."""
    from autotune.tune import measure
    from autotune.workers import Stopped

    done: list[Choice | None] = []
    with steps("measure", sum(choice is not None for choice in choices)) as progress:
        for choice in choices:
            try:
                done.append(None if choice is None else measure(choice, card))
            except Stopped as error:
                return done, str(error)
            if choice is not None:
                progress.advance(choice.problem.op)
    return done, ""
