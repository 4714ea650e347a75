"""The tables that the commands print."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from autotune.report import Row
    from autotune.search import Problem
    from autotune.tune import Summary

_PIPE_COLUMNS = 160  # of a table that no terminal bounds


def new_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Columns of words, then columns of numbers."""
    table = Table(title=title, title_justify="left", box=None)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def show(table: Table, pipe_columns: int = _PIPE_COLUMNS) -> None:
    """Print it, as wide as the terminal or, into a pipe, as `pipe_columns`."""
    Console(width=None if sys.stdout.isatty() else pipe_columns, highlight=False).print(table)


def pairs(values: Mapping[str, object]) -> str:
    """Names and values in one line; the name of a case stands alone, and first."""
    name = [str(values["name"])] if "name" in values else []
    return " ".join([*name, *(f"{k}={v}" for k, v in values.items() if k != "name")])


def print_problems(found: Sequence[Problem]) -> None:
    """What a search would try."""
    table = new_table("what there is to try", ("op", "key"), ("candidates", "cases"))
    for problem in found:
        sizes = pairs(dict(problem.key))
        table.add_row(problem.op, sizes, str(len(problem.candidates)), str(len(problem.users)))
    total = sum(len(problem.candidates) for problem in found)
    table.add_row("all", f"{len(found)} keys", str(total), "")
    show(table)


def print_summaries(summaries: Sequence[Summary], measured: bool) -> None:
    """What a search found, an op a row."""
    how = "measured" if measured else "modelled, no times"
    title = f"keys, candidates tried and dropped, and what falls away of the default's cost ({how})"
    table = new_table(
        title, ("op",), ("keys", "candidates", "tried", "dropped", "changed", "least", "most")
    )
    table.add_column("dropped by")
    for row in summaries:
        share = [f"{gain:.1%}" for gain in (min(row.gains, default=0), max(row.gains, default=0))]
        rules = ", ".join(f"{rule} {n}" for rule, n in sorted(row.dropped.items()))
        counts = (row.keys, row.candidates, row.tried, sum(row.dropped.values()), len(row.gains))
        table.add_row(row.op, *map(str, counts), *(share if row.gains else ["-", "-"]), rules)
    show(table)


def print_rows(rows: Sequence[Row]) -> None:
    """Defaults and entries side by side."""
    title = "default -> entry; us of all cases of a key, modelled (a static model) or measured"
    table = new_table(title, ("op", "key", "entry"), ())
    for name in ("us", "registers", "spill bytes", "shared bytes", "warps/SM"):
        table.add_column(name, justify="right")
    table.add_column("source")
    for row in rows:
        pair = (row.before, row.after)
        changed = {k: v for k, v in row.after.config.items() if row.before.config[k] != v}
        table.add_row(
            row.op, pairs(row.key), pairs(changed) or "as the default",
            " -> ".join(f"{x.us:.4g}" for x in pair), " -> ".join(str(x.registers) for x in pair),
            " -> ".join(str(x.spill_bytes) for x in pair),
            " -> ".join(str(x.shared_bytes) for x in pair),
            " -> ".join(str(x.warps_per_sm) for x in pair), row.source,
        )  # fmt: skip
    show(table)
