"""What compiles, with its progress on stderr."""

from __future__ import annotations

import contextlib
import os
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


def state_file(gpu: str) -> Path:
    """Where results of a run are kept for the next one."""
    return Path.home() / ".cache" / "ftkernels" / f"tune-{gpu}.jsonl"


@contextlib.contextmanager
def counting(verb: str, total: int) -> Iterator[Callable[[str], None]]:
    """A function to be told the name of each op as it is begun."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(verb, total=total)

        def advance(op: str) -> None:
            progress.update(task, description=f"{verb} {op}", advance=1)

        yield advance


@contextlib.contextmanager
def compiling(
    found: Sequence[Problem], arch: int, state: Path | None, jobs: int | None, *,
    prune: bool = True,
) -> Iterator[Setup]:  # fmt: skip
    """A setup that shows trials, those dropped, the best gain and the time left.

    Args:
        state: file of results that need no compile, None for none.
        jobs: processes that compile, None for one a core.
        prune: leave out configs that no figure could make the choice.
    """
    from autotune import static
    from autotune.trials import State
    from autotune.tune import Setup, model_hash

    say = Console(stderr=True, highlight=False)
    total = sum(len(problem.candidates) for problem in found)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[dropped]} dropped, best {task.fields[best]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=say, transient=True) as progress:
        advance = _watched(progress, total)
        try:
            kept = State(state, lambda sentence: click.echo(f"ft-autotune: {sentence}", err=True))
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        workers = jobs or os.cpu_count() or 1
        yield Setup(arch, static.score, model_hash(), kept, workers, prune, advance)


def _watched(progress: Progress, total: int) -> Callable[[Job, Trial], None]:
    """Counts trials, those dropped and the largest gain on a default."""
    from autotune.search import refusal

    task = progress.add_task("compile", total=total, dropped=0, best="-")
    defaults: dict[tuple[str, object, int], Trial] = {}
    dropped, best = 0, 0.0

    def advance(job: Job, trial: Trial) -> None:
        nonlocal dropped, best
        default = defaults.setdefault((job.op, job.key, len(job.users)), trial)
        if refusal(trial, default):
            dropped += 1
        elif not refusal(default, default) and 1 - sum(trial.us) / sum(default.us) > best:
            best = 1 - sum(trial.us) / sum(default.us)
            progress.update(task, best=f"-{best:.0%} {job.op}")
        progress.update(task, description=f"compile {job.op}", dropped=dropped, advance=1)

    return advance


def measuring(choices: Sequence[Choice | None], card: Card) -> list[Choice | None]:
    """Every choice after a card has measured it."""
    from autotune.tune import measure

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("measure", total=len(choices))
        done: list[Choice | None] = []
        for choice in choices:
            done.append(None if choice is None else measure(choice, card))
            progress.update(task, advance=1)
    return done
