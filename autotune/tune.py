"""Finds the config of every key of the named ops and writes it down.

Without a card the static model ranks the candidates, and entries say so ("modelled"). With one the
best of the ranking and the default are measured ("measured").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from autotune import passes, pipes, static, store
from autotune.measure import measured
from autotune.search import Choice, Problem, Trial, can_gain, choose, refusal
from autotune.state import State
from autotune.trials import Job, Score, run
from ftkernels import config, offline, registry, target, work
from ftkernels.testing import aot, loops, report, sass
from ftkernels.testing.timer import Timer

# what the figures can tell apart: the model leaves out latencies, bank conflicts and what caches
# hold, and a card's clock moves
MODELLED_MARGIN = 0.15
MEASURED_MARGIN = 0.02
# versions for which every modelled entry is compiled and run by value before it is shipped
VERSIONS = "3.6 3.7 3.8 3.9"


@dataclass(frozen=True)
class Setup:
    """What compiles and judges.

    Args:
        model: hash of the score's sources.
        prune: leave out configs that no figure could make the choice.
        advance: told of each trial as it comes.
        expect: told how many trials there are, once it is known.
    """

    arch: int
    score: Score
    model: str
    state: State
    num_workers: int
    prune: bool = True
    advance: Callable[[Job, Trial], None] = lambda job, trial: None
    expect: Callable[[int], None] = lambda total: None


@dataclass(frozen=True)
class Card:
    """A card that measures, and how many of a ranking it does."""

    timer: Timer
    name: str
    driver: str
    top: int


def model_hash() -> str:
    """Hash of the sources that the static model's figures follow from."""
    return config.source_hash(
        static.score, passes.passes_of, pipes.cycles, sass.regions, loops.find_loops,
        report.report_of, aot.capture_launches, offline.compile_launches, target.of_arch,
        work.even_loop,
    )  # fmt: skip


def job_of(problem: Problem, record: Any, setup: Setup, *, inside: bool = False) -> Job:
    """One config of a problem, in its own cases or inside its hosts."""
    users = problem.hosts if inside else problem.users
    return Job(problem.op, problem.key, record, users, setup.arch, setup.score, setup.model)


def search(found: Sequence[Problem], setup: Setup) -> list[Choice | None]:
    """The choice for every problem, in order; None where not even the default is sound."""
    tried = _tried(found, setup)
    choices = [
        choose(problem, by_record, margin=MODELLED_MARGIN)
        for problem, by_record in zip(found, tried, strict=True)
    ]
    open_ = [index for index, choice in enumerate(choices) if _needs_host(choice)]
    while open_:
        _drop_unsound_inside(open_, found, choices, tried, setup)
        again = []
        for index in open_:
            choice = choose(found[index], tried[index], margin=MODELLED_MARGIN)
            if _needs_host(choice) and choice != choices[index]:
                again.append(index)
            choices[index] = choice
        open_ = again
    return choices


def _tried(found: Sequence[Problem], setup: Setup) -> list[dict[object, Trial]]:
    """The trials of every problem: of its default first, then of the others that matter."""
    defaults = _run([job_of(problem, problem.default, setup) for problem in found], setup)
    tried = []
    for problem, default in zip(found, defaults, strict=True):
        matter = not setup.prune or can_gain(problem, default, setup.arch, margin=MODELLED_MARGIN)
        tried.append(problem.candidates[1:] if matter else ())
    jobs = [
        job_of(x, record, setup) for x, of_x in zip(found, tried, strict=True) for record in of_x
    ]
    setup.expect(len(found) + len(jobs))
    others = iter(_run(jobs, setup))
    return [
        {problem.default: default, **{record: next(others) for record in of_one}}
        for problem, default, of_one in zip(found, defaults, tried, strict=True)
    ]


def _run(jobs: Sequence[Job], setup: Setup) -> list[Trial]:
    return run(jobs, setup.state, num_workers=setup.num_workers, advance=setup.advance)


def _needs_host(choice: Choice | None) -> bool:
    if choice is None or not choice.problem.hosts:
        return False
    return choice.config != choice.problem.default


def _drop_unsound_inside(
    indices: Sequence[int], found: Sequence[Problem], choices: Sequence[Choice | None],
    tried: Sequence[dict[object, Trial]], setup: Setup,
) -> None:  # fmt: skip
    """Fail the chosen configs that the kernels of other ops cannot take."""
    jobs = []
    for index in indices:
        choice = choices[index]
        assert choice is not None
        for record in (found[index].default, choice.config):
            jobs.append(job_of(found[index], record, setup, inside=True))
    trials = iter(_run(jobs, setup))
    for index in indices:
        default, inside = next(trials), next(trials)
        choice = choices[index]
        assert choice is not None
        rule = refusal(inside, default)
        if rule:
            before = tried[index][choice.config]
            rule = f"{rule} inside {found[index].hosts[0][0]}"
            tried[index][choice.config] = Trial(before.us, before.launches, rule)


def measure(choice: Choice, card: Card) -> Choice | None:
    """The choice after the best of its ranking and a sound default have been timed."""
    problem = choice.problem
    best = [x for x in choice.ranking if x != problem.default][: card.top]
    timed = Problem(problem.op, problem.key, problem.users, (), (problem.default, *best))
    is_sound = choice.default_us is not None
    trials = {
        record: measured(timed, record, card.timer)
        for record in (timed.candidates if is_sound else best)
    }
    # an unsound one may not even start
    trials.setdefault(problem.default, Trial(error="unsound default"))
    return choose(timed, trials, margin=MEASURED_MARGIN)


def entry_of(choice: Choice, card: Card | None) -> dict[str, Any]:
    """What is written for a choice; `us` and `default_us` are sums over its cases.

    `default_us` is None where the default is unsound.
    """
    default_us = None if choice.default_us is None else round(choice.default_us, 3)
    entry: dict[str, Any] = {
        "key": dict(choice.problem.key), "config": asdict(choice.config),  # type: ignore[call-overload]
        "us": round(choice.us, 3), "default_us": default_us,
        "source": "modelled", "triton": VERSIONS,
        "source_hash": config.made_from(choice.problem.op, default_of(choice.problem.op)),
    }  # fmt: skip
    if card is not None:
        entry |= {
            "source": "measured", "triton": triton.__version__, "device": card.name,
            "driver": card.driver,
        }  # fmt: skip
    return entry


def default_of(op: str) -> Callable[..., Any]:
    """The default of an op with kernels, whose module is what entries are made from."""
    default = next(spec.default for spec in registry() if spec.name == op)
    assert default is not None
    return default


def write(
    choices: Sequence[Choice | None], root: Path, gpu: str, card: Card | None = None
) -> list[Path]:
    """Write the entries of all choices, a file an op.

    Raises:
        OSError: the folder cannot be written.
    """
    by_op: dict[str, list[dict[str, Any]]] = {}
    for choice in choices:
        # where there is nothing to choose from the default needs no entry
        if choice is not None and len(choice.problem.candidates) > 1:
            by_op.setdefault(choice.problem.op, []).append(entry_of(choice, card))
    return [store.write(root, gpu, op, new, default_of(op)) for op, new in by_op.items()]


@dataclass(frozen=True)
class Summary:
    """Of one op: keys by their outcome, candidates, those compiled, and those dropped by each rule.

    Args:
        gains: of every key whose entry beats its default, the share of the default's time that
            falls away.
        kept: keys that stay at the default.
        replaced: keys whose default is unsound.
        unsound: keys without a sound config.
    """

    op: str
    keys: int
    candidates: int
    tried: int
    dropped: Mapping[str, int]
    gains: tuple[float, ...]
    kept: int
    replaced: int
    unsound: int


def summaries(found: Sequence[Problem], choices: Sequence[Choice | None]) -> list[Summary]:
    """One of every op, in order."""
    grouped: dict[str, list[tuple[Problem, Choice | None]]] = {}
    for problem, choice in zip(found, choices, strict=True):
        grouped.setdefault(problem.op, []).append((problem, choice))
    return [_summary(op, pairs) for op, pairs in grouped.items()]


def _summary(op: str, pairs: Sequence[tuple[Problem, Choice | None]]) -> Summary:
    chosen = [choice for _, choice in pairs if choice is not None]
    dropped: Counter[str] = Counter()
    for choice in chosen:
        dropped.update(choice.dropped)
    changed = [x for x in chosen if x.config != x.problem.default]
    gains = tuple(x.gain for x in changed if x.gain is not None)
    return Summary(
        op, len(pairs), sum(len(problem.candidates) for problem, _ in pairs),
        sum(choice.tried for choice in chosen), dropped, gains, len(chosen) - len(changed),
        len(changed) - len(gains), len(pairs) - len(chosen),
    )  # fmt: skip
