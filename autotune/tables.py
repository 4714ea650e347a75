"""The tables that the commands print: rows of one line where they fit, else of several."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.search import Choice, Problem
    from autotune.tune import Summary

PIPE_COLUMNS = 100  # of what no terminal bounds
_GAPS, _INDENT = (2, 1), 4  # between columns: the first that fits


def screen_columns(of_pipe: int = PIPE_COLUMNS) -> int:
    """As COLUMNS says, else of the terminal; `of_pipe` where there is neither."""
    return shutil.get_terminal_size((of_pipe, 1)).columns


def say(text: str, indent: int = 0) -> None:
    """Print a text, with line breaks between words where the screen ends.

    Args:
        indent: of the lines behind the first.
    """
    print("\n".join(_wrapped(text, screen_columns(), indent)))


def _wrapped(line: str, columns: int, indent: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    return textwrap.wrap(
        line, max(columns, 2 * indent + 1), subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def print_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[bool],
    of_pipe: int = PIPE_COLUMNS, widths: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """A head and rows. What is too wide for the screen goes on in further, indented lines.

    Args:
        numbers: the columns that are set to the right; those before the first of them are what a
            row is about.
        of_pipe: see `screen_columns`.
        widths: the least of each column.
    """
    least = widths or [0] * len(names)
    full = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    full = [max(pair) for pair in zip(least, full, strict=True)]
    columns = screen_columns(of_pipe)
    fitting = [gap for gap in _GAPS if sum(full) + gap * (len(full) - 1) <= columns]
    gap = (*fitting, _GAPS[-1])[0]
    every = list(range(len(full)))
    parts = [every]
    if not fitting:
        num_words = numbers.index(True) if True in numbers else len(full)
        parts = [*_filled(every[:num_words], full, columns)]
        parts += _filled(every[num_words:], full, columns)
    for number, row in enumerate((names, *rows)):
        if len(parts) > 1 and number:
            print()
        for place, part in enumerate(parts):
            cells = (
                row[i].rjust(full[i]) if numbers[i] else row[i].ljust(full[i]) for i in part
            )  # fmt: skip
            line = " " * (_INDENT * (place > 0)) + (" " * gap).join(cells).rstrip()
            print("\n".join(_wrapped(line, columns, 2 * _INDENT)))


def _filled(
    places: Sequence[int], widths: Sequence[int], columns: int
) -> Iterator[list[int]]:  # fmt: skip
    """The columns of each line."""
    part: list[int] = []
    left = 0
    for place in places:
        left -= widths[place] + _GAPS[-1]
        if part and left < 0:
            yield part
            part = []
        if not part:
            left = columns - _INDENT - widths[place]
        part.append(place)
    if part:
        yield part


def pairs(values: Mapping[str, object]) -> str:
    """Names and values in one line; the name of a case stands alone, and first."""
    name = [str(values["name"])] if "name" in values else []
    return " ".join([*name, *(f"{k}={v}" for k, v in values.items() if k != "name")])


def counted(number: int, one: str, more: str) -> str:
    """A number with its noun."""
    return f"{number} {one if number == 1 else more}"


def print_problems(found: Sequence[Problem]) -> None:
    """What a search would try."""
    say("what there is to try")
    rows = [
        (x.op, pairs(dict(x.key)), str(len(x.candidates)), str(len(x.users))) for x in found
    ]  # fmt: skip
    total = sum(len(problem.candidates) for problem in found)
    rows.append(("all", f"{len(found)} keys", str(total), ""))
    names, numbers = ("op", "key", "candidates", "cases"), (False, False, True, True)
    print_table(names, rows, numbers=numbers)


def print_summaries(summaries: Sequence[Summary], measured: bool) -> None:
    """What a search found, an op a row; below, the configs that each rule dropped."""
    how = "measured" if measured else "modelled by a static model, no times"
    say(f"keys by outcome. gain: the share of the default's time that falls away, {how}.")
    if not measured:
        say(
            "tried: candidates compiled; of the others none could win by more than the model's "
            "margin, see `ft-autotune tune --help`."
        )
    names = ("op", "keys", "kept", "changed", "unsound", "gain", "tried", "of")
    rows = [(row.op, *_outcome(row)) for row in summaries]
    if len(summaries) > 1:
        rows.append(("all", *_outcome(*summaries)))
    print_table(names, rows, numbers=[name != "op" for name in names])
    for row in summaries:
        if row.dropped:
            rules = ", ".join(f"{rule} {n}" for rule, n in sorted(row.dropped.items()))
            say(f"{row.op}, dropped: {rules}", _INDENT)


def print_changed(choices: Sequence[Choice | None]) -> None:
    """The keys whose config is not the default, a line each."""
    changed = [x for x in choices if x is not None and x.config != x.problem.default]
    if changed:
        say("changed keys, default -> chosen:")
    for choice in changed:
        default: Any = choice.problem.default
        chosen: Any = choice.config
        gain = "the default is unsound" if choice.gain is None else f"gain {choice.gain:.0%}"
        fields = differences(asdict(default), asdict(chosen))
        key = pairs(dict(choice.problem.key))
        say(f"  {choice.problem.op} {key}: {fields}; {gain}", 2 * _INDENT)


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """The fields that differ, with both values."""
    return ", ".join(f"{k} {before[k]} -> {v}" for k, v in after.items() if before[k] != v)


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
