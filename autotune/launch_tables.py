"""The tables of `ft-autotune inspect`: short ones, or one with every figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from autotune.tables import PIPE_COLUMNS, pairs, print_table, say
from ftkernels import target

if TYPE_CHECKING:
    from autotune.contract import Change
    from autotune.inspect import LaunchRow
    from autotune.static import LoopFigures

_ANY_COLUMNS = 10_000  # of a wide table that no terminal bounds
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
    tables: Literal["both", "short", "wide", "candidates"] = "both"


_LAUNCH: Sequence[_Column[LaunchRow]] = (
    _Column("op", lambda row: row.op, number=False, tables="wide"),
    _Column("case", lambda row: pairs(row.case), number=False, tables="wide"),
    _Column("case", lambda row: _case(row), number=False, tables="short"),
    _Column("config", lambda row: pairs(row.config), number=False, tables="candidates"),
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
    say(
        f"launches on sm_{arch}, {_card(int(arch))}. As compiled: registers, bytes spilled and "
        "shared. By a static model, no times: warps of an SM, issue slots for 1024 useful "
        "multiply-adds, their ceiling, us, and what bounds it."
    )
    kinds = ["both", "wide" if wide else "short"]
    # a candidate is told from others by its config alone
    if not wide and any(row.source == "candidate" for row in rows):
        kinds.append("candidates")
    _print(_LAUNCH, rows, lambda row: f"{row.op}  {row.figures.kernel}", kinds)


def print_loops(rows: Sequence[LaunchRow], arch: str, *, wide: bool) -> None:
    """The loops that matter, of each launch the rest of its code last."""
    print()
    say(
        f"loops on sm_{arch}, {_card(int(arch))}, a pass of one block; a static model, no times. "
        "issued: issue slots; slots: of them for 1024 useful multiply-adds; loads: bytes of a "
        "lane x number."
    )
    kinds = ["both", "wide" if wide else "short"]
    loops = [x for row in rows for x in _loops(row)]
    _print(_LOOP, loops, lambda x: f"{x.row.op} {_case(x.row)}  {x.row.figures.kernel}", kinds)


def _card(arch: int) -> str:
    card = target.of_arch(arch)
    return f"{card.name}, {card.memory_gb_per_s:.0f} GB/s"


def _loops(row: LaunchRow) -> Iterator[LoopRow]:
    for number, loop in enumerate(row.figures.loops):
        yield LoopRow(row, str(number), loop)
    yield LoopRow(row, "rest", row.figures.rest)


def print_changes(changes: Sequence[Change], name: str) -> None:
    """What differs from the contract, a file of that name: a table for each launch."""
    print(f"figures that differ from {name}; a static model, no times")
    for (op, case, kernel), found in groupby(changes, lambda x: (x.op, x.case, x.kernel)):
        print(f"\n{op} {case}  {kernel}")
        rows = [(x.figure, str(x.committed), str(x.now), "WORSE" if x.fails else "") for x in found]
        print_table(("figure", "committed", "now", ""), rows, numbers=(False,) * 4)


def _print(
    columns: Sequence[_Column[T]], rows: Sequence[T], title: Callable[[T], str],
    kinds: Sequence[str],
) -> None:  # fmt: skip
    shown = [x for x in columns if x.tables in kinds]
    is_wide = "wide" in kinds
    parts: dict[str, list[list[str]]] = {}
    for row in rows:
        parts.setdefault("" if is_wide else title(row), []).append([x.of(row) for x in shown])
    names, numbers = [x.name for x in shown], [x.number for x in shown]
    # figures of one kind stand below each other in all tables
    lines = [line for part in parts.values() for line in part]
    widths = [max(map(len, cells)) for cells in zip(names, *lines, strict=True)]
    columns_of_pipe = _ANY_COLUMNS if is_wide else PIPE_COLUMNS
    for name, part in parts.items():
        print(f"\n{name}" if name else "")
        print_table(names, part, numbers=numbers, of_pipe=columns_of_pipe, widths=widths)


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
