"""The tables that the commands print."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from autotune.search import Problem
    from autotune.tune import Summary

_PIPE_COLUMNS = 160  # of a table that no terminal bounds
_NARROW_COLUMNS = 80


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
    """What a search found, an op a row; below, the configs that each rule dropped."""
    how = "measured" if measured else "modelled by a static model, no times"
    title = f"keys by outcome; gain: the share of the default's time that falls away\n({how})"
    numbers = ("keys", "kept", "changed", "unsound", "gain", "tried", "of")
    table = new_table(title, ("op",), numbers)
    for row in summaries:
        table.add_row(row.op, *_outcome(row))
    if len(summaries) > 1:
        table.add_row("all", *_outcome(*summaries))
    show(table, _NARROW_COLUMNS)
    for row in summaries:
        if row.dropped:
            rules = ", ".join(f"{rule} {n}" for rule, n in sorted(row.dropped.items()))
            click.echo(f"{row.op}, dropped: {rules}")
    replaced = sum(row.replaced for row in summaries)
    if replaced:
        click.echo(f"changed keys without a sound default to gain on: {replaced}")


def _outcome(*rows: Summary) -> list[str]:
    changed = sum(len(row.gains) + row.replaced for row in rows)
    counts = [sum(row.keys for row in rows), sum(row.kept for row in rows), changed]
    counts.append(sum(row.unsound for row in rows))
    tried = [sum(row.tried for row in rows), sum(row.candidates for row in rows)]
    gains = [gain for row in rows for gain in row.gains]
    return [*map(str, counts), _range(gains), *map(str, tried)]


def _range(gains: Sequence[float]) -> str:
    if not gains:
        return "-"
    least, most = f"{min(gains):.0%}", f"{max(gains):.0%}"
    return most if least == most else f"{least} to {most}"
