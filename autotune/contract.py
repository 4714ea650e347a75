"""The committed figures of the model's shapes on sm_89, and what may not get worse.

The figures are compiled or read off machine code and so a static model: none is a time.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import entries
from autotune.inspect import LaunchRow
from autotune.search import lookups
from autotune.static import LaunchFigures
from autotune.store import replace_whole
from ftkernels import config
from ftkernels.spec import Case, KernelSpec, registry
from ftkernels.target import of_arch
from ftkernels.testing import figures

Entry = Mapping[str, Any]
SHARED_BYTES = 101376  # of a block on sm_89, by the vendor's table
NAME = "bench_kernels/contract.json"
COMMITTED = Path(__file__).parents[1] / NAME
_SLOWER_TOLERANCE = 0.05
_WIDE_TOLERANCE = 0.01
_RANKS = re.compile(r"\btp(\d+)\b")
_HELD_RANKS = ("1", "8")


@dataclass(frozen=True)
class Change:
    """A figure of one launch that is not what was committed; `fails` when it may not be."""

    op: str
    case: str
    kernel: str
    figure: str
    committed: object
    now: object
    fails: bool

    def __str__(self) -> str:
        return (
            f"{self.op} {self.case} {self.kernel}: {self.figure} was {self.committed}, "
            f"is {self.now}"
        )


def is_held(case: Case) -> bool:
    """Whether the contract has figures of a case: those of Flash, on one card or eight."""
    name = str(case.get("name", ""))
    named = _RANKS.search(name)
    return name.startswith("flash") and (named is None or named[1] in _HELD_RANKS)


def entry(row: LaunchRow) -> dict[str, object]:
    """What is committed of a launch."""
    x = row.figures
    return {
        "kernel": x.kernel, "registers": x.registers, "spill_bytes": x.spill_bytes,
        "shared_bytes": x.shared_bytes, "warps_per_sm": x.warps_per_sm, "mma": _mma(x),
        "copies": sum(loop.copies for loop in (*x.loops, x.rest)),
        "wide_share": round(x.wide_share, 3), "issue_per_kmac": _rounded(x.issue_per_kmac),
        "ceiling_tflops": _rounded(x.ceiling_tflops),
        "ceiling_gb_per_s": _rounded(x.ceiling_gb_per_s), "us": _rounded(x.us), "bound": x.bound,
    }  # fmt: skip


def _mma(found: LaunchFigures) -> dict[str, int]:
    """How often each matrix instruction stands in the code."""
    total = Counter[str]()
    for loop in (*found.loops, found.rest):
        total.update(loop.mma)
    return dict(sorted(total.items()))


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def changes(
    op: str, case: Case, rows: Sequence[LaunchRow], committed: Sequence[Entry]
) -> list[Change]:
    """What differs between the launches of a case and their committed figures."""
    name, now, found = str(case["name"]), [entry(row) for row in rows], []
    before, after = ([str(x["kernel"]) for x in entries] for entries in (committed, now))
    if before != after:
        return [Change(op, name, "all", "launches", before or "not committed", after, True)]
    for old, new, kernel in zip(committed, now, after, strict=True):
        for figure, value in new.items():
            was = old.get(figure)
            if was != value or _unsound(figure, new):
                fails = _fails(figure, old, new)
                found.append(Change(op, name, kernel, figure, was, value, fails))
    return found


def _unsound(figure: str, new: Entry) -> bool:
    if figure == "spill_bytes":
        return bool(new[figure])
    return figure == "shared_bytes" and bool(new[figure] > SHARED_BYTES)


def _fails(figure: str, old: Entry, new: Entry) -> bool:
    if _unsound(figure, new):
        return True
    if figure == "mma":
        return bool(set(old[figure]) - set(new[figure]))
    if figure == "copies":
        return _lost_copies(old, new)
    if figure == "wide_share":
        return bool(new[figure] < old[figure] - _WIDE_TOLERANCE)
    if figure in ("issue_per_kmac", "us") and old[figure] is not None:
        return new[figure] is None or bool(new[figure] > old[figure] * (1 + _SLOWER_TOLERANCE))
    return False


def _lost_copies(old: Entry, new: Entry) -> bool:
    """Whether there are fewer copies and products unrolled less often do not account for it."""
    before, after = (sum(x["mma"].values()) for x in (old, new))
    fewer = new["copies"] < old["copies"]
    return bool(fewer and (not before or new["copies"] * before < old["copies"] * after))


@dataclass(frozen=True)
class Contract:
    """Committed figures by op and case, of one Triton version."""

    triton: str
    launches: Mapping[tuple[str, str], Sequence[Entry]]

    def of(self, op: str, case: Case) -> Sequence[Entry]:
        """The launches of a case in order; none when it is not committed."""
        return self.launches.get((op, str(case.get("name", ""))), ())

    def changes(self, rows: Sequence[LaunchRow]) -> list[Change]:
        """What differs in the held cases among `rows`."""
        found = []
        for (op, _), part in by_case(rows).items():
            found += changes(op, part[0].case, part, self.of(op, part[0].case))
        return found

    def strays(self, specs: Sequence[KernelSpec]) -> list[str]:
        """A sentence for each case that these ops hold and the file does not, or the reverse.

        Nothing is compiled. Other ops that exist are let be.
        """
        held, known = held_launches(specs), {spec.name for spec in registry()}
        let_be = known - {spec.name for spec in specs}
        committed = {k: len(part) for k, part in self.launches.items() if k[0] not in let_be}
        return [
            f"contract: case {' '.join(key)} has {committed.get(key, 0)} launches, expected "
            f"{held.get(key, 0)}: ft-autotune inspect --write-contract"
            f"{f' {key[0]}' if key[0] in known else ''}"
            for key in sorted({*held, *committed})
            if held.get(key, 0) != committed.get(key, 0)
        ]


def way_out(op: str) -> str:
    """What to do about figures of an op that got worse."""
    return (
        f"contract: ft-autotune tune {op} when its source changed, "
        f"ft-autotune inspect --write-contract {op} when the change is wanted"
    )


def ignored(specs: Sequence[KernelSpec]) -> str:
    """A sentence when lookups of the held cases ignore entries, else empty."""
    cases = [(spec, case) for spec in specs for case in spec.cases if spec.kernel and is_held(case)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this tells the same
        heard = [x for spec, case in cases for x in lookups(spec, case, figures.ARCH)]
    by_default = {x.op for x in heard if x.source == "default"}
    asked = [spec for spec in registry() if spec.name in by_default]
    found = entries.read(config.folder(), of_arch(figures.ARCH).name, asked).ignored
    ops = " ".join(sorted(found))
    if not found:
        return ""
    return (
        f"contract: entries of {ops} are ignored, the figures are those of defaults: "
        f"ft-autotune tune {ops}"
    )


def num_left_out(specs: Sequence[KernelSpec]) -> int:
    """Launches of the cases of these ops that the contract leaves out."""
    return sum(
        spec.launches(case) for spec in specs for case in spec.cases
        if spec.kernel and not is_held(case)
    )  # fmt: skip


def held_launches(specs: Sequence[KernelSpec]) -> dict[tuple[str, str], int]:
    """Launches of each case that the contract holds, by op and name."""
    return {
        (spec.name, str(case["name"])): spec.launches(case)
        for spec in specs
        for case in spec.cases
        if spec.kernel and is_held(case)
    }


def by_case(rows: Sequence[LaunchRow]) -> dict[tuple[str, str], list[LaunchRow]]:
    """The rows of each held case, in order."""
    found: dict[tuple[str, str], list[LaunchRow]] = {}
    for row in rows:
        if is_held(row.case):
            found.setdefault((row.op, str(row.case["name"])), []).append(row)
    return found


def read(path: Path = COMMITTED) -> Contract:
    """The committed figures.

    Raises:
        ValueError: there are none, or the file is damaged.
    """
    return Contract(*figures.read(path))


def write(rows: Sequence[LaunchRow], path: Path = COMMITTED, *, others: bool = True) -> int:
    """Commit the held cases of `rows`; the file is replaced as a whole or not at all.

    Args:
        others: keep the figures of ops that are not among `rows`.

    Returns:
        The number of launches in the file.

    Raises:
        ValueError: the others' figures are damaged, or of another Triton.
        OSError: the file cannot be written.
    """
    version = rows[0].triton
    launches = _others({row.op for row in rows}, version, path) if others else {}
    for key, part in by_case(rows).items():
        launches[key] = [{"op": key[0], "case": key[1], **entry(row)} for row in part]
    lines = [json.dumps(x, allow_nan=False) for key in sorted(launches) for x in launches[key]]
    head = f'{{"triton": "{version}", "arch": {figures.ARCH}, "launches": [\n'
    replace_whole(path, head + ",\n".join(lines) + "\n]}\n")
    return len(lines)


def _others(
    ops: Collection[str], version: str, path: Path
) -> dict[tuple[str, str], Sequence[Entry]]:  # fmt: skip
    """What is committed of ops but these."""
    if not path.exists():
        return {}
    before = read(path)
    kept = {key: part for key, part in before.launches.items() if key[0] not in ops}
    if kept and before.triton != version:
        raise ValueError(
            f"contract: triton is {version}, expected {before.triton} as for the other ops"
        )
    return kept
