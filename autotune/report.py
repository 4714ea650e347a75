"""Before and after: what the default of each key uses and what its entry does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autotune.search import Problem, Trial, refusal
from autotune.trials import run
from autotune.tune import Setup, job_of
from ftkernels import config


@dataclass(frozen=True)
class Side:
    """One config of a key over all launches of its cases.

    Args:
        us: of all cases together, None where the config is unsound; `source` says whether it is
            "modelled", now, or "measured", when the entry was made.
        registers, shared_bytes: the most of any launch; `warps_per_sm` the fewest.
        spill_bytes: of all launches.
    """

    config: Mapping[str, object]
    us: float | None
    source: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps_per_sm: int


@dataclass(frozen=True)
class Row:
    """One key of one op; without an entry (`source` "default") both sides are the default.

    Args:
        source: of the config that lookups give.
    """

    op: str
    key: Mapping[str, int]
    source: str
    before: Side
    after: Side

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def rows(
    found: Sequence[Problem], entries: Mapping[tuple[str, config.FrozenKey], Mapping[str, Any]],
    setup: Setup,
) -> list[Row]:  # fmt: skip
    """A row for every key that has an entry or candidates, in order.

    Args:
        entries: what lookups take, by op and key.
    """
    kept = [x for x in found if (x.op, x.key) in entries or len(x.candidates) > 1]
    given = [_record(x, entries.get((x.op, x.key))) for x in kept]
    jobs = {
        (number, record): job_of(problem, record, setup)
        for number, (problem, chosen) in enumerate(zip(kept, given, strict=True))
        for record in (problem.default, chosen)
    }
    setup.expect(len(jobs))
    trials = run(
        jobs.values(), setup.state, num_workers=setup.num_workers, advance=setup.advance
    )  # fmt: skip
    return list(_rows(kept, given, entries, dict(zip(jobs, trials, strict=True))))


def _rows(
    kept: Sequence[Problem], given: Sequence[object],
    entries: Mapping[tuple[str, config.FrozenKey], Mapping[str, Any]],
    trials: Mapping[tuple[int, object], Trial],
) -> Iterator[Row]:  # fmt: skip
    for number, (problem, record) in enumerate(zip(kept, given, strict=True)):
        entry = entries.get((problem.op, problem.key))
        before, after = (
            _side(x, trials[number, x], entry, name)
            for x, name in ((problem.default, "default_us"), (record, "us"))
        )
        source = "default" if entry is None else str(entry["source"])
        yield Row(problem.op, dict(problem.key), source, before, after)


def _record(problem: Problem, entry: Mapping[str, Any] | None) -> object:
    return problem.default if entry is None else replace(problem.default, **entry["config"])  # type: ignore[type-var]


def _side(record: Any, trial: Trial, entry: Mapping[str, Any] | None, name: str) -> Side:
    launches = trial.launches
    if entry is not None and entry["source"] == "measured":
        us = entry.get(name)
    else:  # by the model of today: what an entry holds may be of another one
        us = None if refusal(trial, trial) else round(sum(trial.us), 3)
    return Side(
        config=asdict(record),
        us=us,
        source="modelled" if entry is None else str(entry["source"]),
        registers=max((x.registers for x in launches), default=0),
        spill_bytes=sum(x.spill_bytes for x in launches),
        shared_bytes=max((x.shared_bytes for x in launches), default=0),
        warps_per_sm=min((x.warps_per_sm for x in launches), default=0),
    )
