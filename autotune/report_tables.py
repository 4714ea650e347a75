"""The tables of `ft-autotune report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from autotune.tables import differences, pairs, print_table, say

if TYPE_CHECKING:
    from autotune.report import Row, Side

_FIGURES: Sequence[tuple[str, Callable[[Side], str]]] = (
    ("us", lambda side: "-" if side.us is None else f"{side.us:.4g}"),
    ("regs", lambda side: str(side.registers)),
    ("spill", lambda side: str(side.spill_bytes)),
    ("shared", lambda side: str(side.shared_bytes)),
    ("warps", lambda side: str(side.warps_per_sm)),
)
_NAMES = ("key", "entry", *(name for name, _ in _FIGURES), "source")
_NUMBERS = (False, False, *(True for _ in _FIGURES), False)


def print_rows(rows: Sequence[Row]) -> None:
    """A table for each op: what its keys' defaults use, and where an entry differs what it does."""
    say(
        "default -> entry. us: of all cases of a key, by a static model or measured, see source. "
        "As compiled: registers, bytes spilled and shared. By the model: warps of an SM."
    )
    for op, group in groupby(rows, key=lambda row: row.op):
        print(f"\n{op}")
        print_table(_NAMES, [_cells(row) for row in group], numbers=_NUMBERS)


def _cells(row: Row) -> list[str]:
    sides = (row.before, row.after)
    changed = differences(row.before.config, row.after.config)
    source = "modelled" if row.source == "default" else row.source
    figures = [_both(*map(figure, sides)) for _, figure in _FIGURES]
    return [pairs(row.key), changed or _unchanged(row), *figures, source]


def _unchanged(row: Row) -> str:
    return "none" if row.source == "default" else "as the default"


def _both(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"
