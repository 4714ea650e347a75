"""The tables of `ft-autotune inspect`: short ones of 100 columns, or one with every figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from rich.table import Table

from autotune.tables import new_table, pairs, show

if TYPE_CHECKING:
    from autotune.contract import Change
    from autotune.inspect import LaunchRow
    from autotune.static import LoopFigures

_SHORT_COLUMNS, _WIDE_COLUMNS = 100, 240  # of tables that no terminal bounds
T = TypeVar("T")


@dataclass(frozen=True)
class LoopRow:
    """A loop of a launch, or the rest of its code."""

    row: LaunchRow
    name: str
    loop: LoopFigures


@dataclass(frozen=True)
class _Column(Generic[T]):
    """A figure and the tables that have it."""

    name: str
    of: Callable[[T], str]
    number: bool = True
    tables: Literal["both", "short", "wide"] = "both"


_LAUNCH: Sequence[_Column[LaunchRow]] = (
    _Column("op", lambda row: row.op, number=False, tables="wide"),
    _Column("case", lambda row: pairs(row.case), number=False, tables="wide"),
    _Column("case", lambda row: _case(row), number=False, tables="short"),
    _Column("kernel", lambda row: row.figures.kernel, number=False, tables="wide"),
    _Column("config", lambda row: pairs(row.config), number=False, tables="wide"),
    _Column("regs", lambda row: str(row.figures.registers)),
    _Column("spill", lambda row: str(row.figures.spill_bytes)),
    _Column("shared", lambda row: str(row.figures.shared_bytes)),
    _Column("warps", lambda row: str(row.figures.warps_per_sm) if row.figures.fits else "NO FIT"),
    _Column("slots", lambda row: _number(row.figures.issue_per_kmac, 2)),
    _Column("TF/s", lambda row: _number(row.figures.ceiling_tflops, 0)),
    _Column("block TF/s", lambda row: _number(row.figures.block_tflops, 0), tables="wide"),
    _Column("16-byte", lambda row: f"{row.figures.wide_share:.0%}", tables="wide"),
    _Column("us", lambda row: _us(row.figures.us)),
    _Column("mma", lambda row: row.figures.mma or "-", number=False, tables="wide"),
    _Column("mma", lambda row: _kind(row.figures.mma or "-"), number=False, tables="short"),
    _Column("bound", lambda row: row.figures.bound, number=False),
    _Column("source", lambda row: row.source, number=False),
)
_LOOP: Sequence[_Column[LoopRow]] = (
    _Column("op", lambda x: x.row.op, number=False, tables="wide"),
    _Column("case", lambda x: _case(x.row), number=False, tables="wide"),
    _Column("kernel", lambda x: x.row.figures.kernel, number=False, tables="wide"),
    _Column("loop", lambda x: x.name, number=False),
    _Column("why", lambda x: " ".join(x.loop.why) or "-", number=False, tables="wide"),
    _Column("passes", lambda x: f"{x.loop.passes:.2f}"),
    _Column("MMA", lambda x: _tally(x.loop.mma), tables="wide"),
    _Column("MMA", lambda x: _tally({_kind(op): n for op, n in x.loop.mma.items()}),
            tables="short"),
    _Column("MAC", lambda x: f"{x.loop.useful_macs:.0f}"),
    _Column("issued", lambda x: str(x.loop.slots)),
    _Column("slots", lambda x: _number(x.loop.issue_per_kmac, 2)),
    _Column("loads", lambda x: _tally(x.loop.loads)),
    _Column("copies", lambda x: str(x.loop.copies), tables="wide"),
    _Column("loaded B", lambda x: str(x.loop.load_bytes), tables="wide"),
    _Column("stored B", lambda x: str(x.loop.store_bytes), tables="wide"),
    _Column("bound", lambda x: x.loop.bound),
    _Column("cycles", lambda x: f"{x.loop.bound_cycles:.0f}"),
)  # fmt: skip


def print_launches(rows: Sequence[LaunchRow], arch: str, *, wide: bool) -> None:
    """What every launch uses: a table for each kernel of an op, or a wide one of all."""
    print(
        f"launches on sm_{arch}. As compiled: registers, bytes spilled and shared. By a static "
        "model, no times:\nwarps of an SM, issue slots for 1024 useful multiply-adds, their "
        "ceiling, us, and what bounds it."
    )
    _print(_LAUNCH, rows, lambda row: f"{row.op}  {row.figures.kernel}", wide=wide)


def print_loops(rows: Sequence[LaunchRow], arch: str, *, wide: bool) -> None:
    """The loops that matter, of each launch the rest of its code last."""
    print(
        f"\nloops on sm_{arch}, a pass of one block; a static model, no times. issued: issue "
        "slots; slots: of them\nfor 1024 useful multiply-adds; loads: bytes of a lane x number."
    )
    loops = [x for row in rows for x in _loops(row)]
    _print(_LOOP, loops, lambda x: f"{x.row.op} {_case(x.row)}  {x.row.figures.kernel}", wide=wide)


def _loops(row: LaunchRow) -> Iterator[LoopRow]:
    for number, loop in enumerate(row.figures.loops):
        yield LoopRow(row, str(number), loop)
    yield LoopRow(row, "rest", row.figures.rest)


def print_changes(changes: Sequence[Change]) -> None:
    """What differs from the contract, a table for each launch."""
    print("figures that differ from bench_kernels/contract.json; a static model, no times")
    for (op, case, kernel), found in groupby(changes, lambda x: (x.op, x.case, x.kernel)):
        print(f"\n{op} {case}  {kernel}")
        table = new_table("", ("figure", "committed", "now", ""), ())
        for x in found:
            verdict = "WORSE" if x.fails else ""
            table.add_row(x.figure, str(x.committed), str(x.now), verdict)
        show(table, _SHORT_COLUMNS)


def _print(
    columns: Sequence[_Column[T]], rows: Sequence[T], title: Callable[[T], str], *, wide: bool
) -> None:  # fmt: skip
    shown = [x for x in columns if x.tables in ("both", "wide" if wide else "short")]
    parts: dict[str, list[list[str]]] = {}
    for row in rows:
        parts.setdefault("" if wide else title(row), []).append([x.of(row) for x in shown])
    lines = [[x.name for x in shown], *(line for part in parts.values() for line in part)]
    # figures of one kind stand below each other in all tables
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, part in parts.items():
        print(f"\n{name}" if name else "")
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        for column, width in zip(shown, widths, strict=True):
            justify: Literal["left", "right"] = "right" if column.number else "left"
            table.add_column(column.name, justify=justify, overflow="fold", min_width=width)
        for line in part:
            table.add_row(*line)
        show(table, _WIDE_COLUMNS if wide else _SHORT_COLUMNS)


def _case(row: LaunchRow) -> str:
    return str(row.case.get("name") or pairs(row.case))


def _kind(opcode: str) -> str:
    """The name and the shape of a matrix instruction."""
    return ".".join(opcode.split(".")[:2])


def _tally(numbers: Mapping[str, int] | Mapping[int, int]) -> str:
    return " ".join(f"{name}x{number}" for name, number in numbers.items()) or "-"


def _us(us: float) -> str:
    return f"{us:.3g}" if us < 1000 else f"{us:.0f}"


def _number(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"
