"""The tables of `ft-autotune report`, of 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from autotune.tables import new_table, pairs, show

if TYPE_CHECKING:
    from autotune.report import Row, Side

_COLUMNS = 100  # of tables that no terminal bounds
_FIGURES: Sequence[tuple[str, Callable[[Side], str]]] = (
    ("us", lambda side: "-" if side.us is None else f"{side.us:.4g}"),
    ("regs", lambda side: str(side.registers)),
    ("spill", lambda side: str(side.spill_bytes)),
    ("shared", lambda side: str(side.shared_bytes)),
    ("warps", lambda side: str(side.warps_per_sm)),
)


def print_rows(rows: Sequence[Row]) -> None:
    """A table for each op: what its keys' defaults use, and where an entry differs what it does."""
    print(
        "default -> entry. us: of all cases of a key, by a static model or measured, see source.\n"
        "As compiled: registers, bytes spilled and shared. By the model: warps of an SM."
    )
    for op, group in groupby(rows, key=lambda row: row.op):
        table = new_table(op, ("key", "entry"), [name for name, _ in _FIGURES])
        table.add_column("source")
        for row in group:
            sides = (row.before, row.after)
            changed = {k: v for k, v in row.after.config.items() if row.before.config[k] != v}
            source = "modelled" if row.source == "default" else row.source
            table.add_row(
                pairs(row.key), pairs(changed) or _unchanged(row),
                *(_both(*map(figure, sides)) for _, figure in _FIGURES), source,
            )  # fmt: skip
        print()
        show(table, _COLUMNS)


def _unchanged(row: Row) -> str:
    return "none" if row.source == "default" else "as the default"


def _both(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"
