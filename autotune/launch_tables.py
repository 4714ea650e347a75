"""The tables of `ft-autotune inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune.tables import new_table, pairs, show

if TYPE_CHECKING:
    from autotune.contract import Change
    from autotune.inspect import LaunchRow

_PIPE_COLUMNS = 240  # of a table that no terminal bounds


def print_launches(rows: Sequence[LaunchRow], arch: str) -> None:
    """What every launch uses, a launch a row."""
    title = (
        f"launches on sm_{arch}: registers, spills and shared memory as compiled; issue slots for "
        "1024 useful multiply-adds, ceilings and us by a static model, no times"
    )
    numbers = (
        "registers", "spill bytes", "shared bytes", "warps/SM", "fits", "issue/kMAC", "TFLOP/s",
        "block TFLOP/s", "16-byte", "us",
    )  # fmt: skip
    table = new_table(title, ("op", "case", "kernel", "config"), numbers)
    for name in ("mma", "bound", "source"):
        table.add_column(name)
    for row in rows:
        x = row.figures
        table.add_row(
            row.op, pairs(row.case), x.kernel, pairs(row.config),
            str(x.registers), str(x.spill_bytes), str(x.shared_bytes), str(x.warps_per_sm),
            "yes" if x.fits else "NO", _number(x.issue_per_kmac, 2), _number(x.ceiling_tflops, 0),
            _number(x.block_tflops, 0), f"{x.wide_share:.0%}", f"{x.us:.3g}", x.mma or "-",
            x.bound, row.source,
        )  # fmt: skip
    show(table, _PIPE_COLUMNS)


def print_loops(rows: Sequence[LaunchRow], arch: str) -> None:
    """The loops that matter, of each launch the rest of its code last."""
    title = f"loops on sm_{arch}, a pass of one block; a static model, no times"
    numbers = (
        "passes", "MMA", "useful MAC", "issue slots", "issue/kMAC", "loads B x n", "copies",
        "loaded B", "stored B", "bound", "cycles",
    )  # fmt: skip
    table = new_table(title, ("op", "case", "kernel", "loop"), numbers)
    for row in rows:
        for number, x in enumerate((*row.figures.loops, row.figures.rest)):
            loads = " ".join(f"{width}x{count}" for width, count in x.loads.items())
            mma = " ".join(f"{op} x{count}" for op, count in x.mma.items())
            table.add_row(
                row.op, str(row.case.get("name", "")), row.figures.kernel,
                f"{number} ({', '.join(x.why)})" if x.why else "rest",
                f"{x.passes:.2f}", mma or "-", f"{x.useful_macs:.0f}", str(x.slots),
                _number(x.issue_per_kmac, 2), loads or "-", str(x.copies), str(x.load_bytes),
                str(x.store_bytes), x.bound, f"{x.bound_cycles:.0f}",
            )  # fmt: skip
    show(table, _PIPE_COLUMNS)


def print_changes(changes: Sequence[Change]) -> None:
    """What differs from the contract, a figure a row."""
    title = "figures that differ from bench_kernels/contract.json; a static model, no times"
    table = new_table(title, ("op", "case", "kernel", "figure", "committed", "now", ""), ())
    for x in changes:
        verdict = "WORSE" if x.fails else ""
        table.add_row(x.op, x.case, x.kernel, x.figure, str(x.committed), str(x.now), verdict)
    show(table, _PIPE_COLUMNS)


def _number(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"
