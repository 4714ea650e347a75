"""Tables and command lines in plain text: the interpreter that runs a bench may have torch only."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

Cell = str | float | int | None


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns side by side: words to the left, numbers to the right, `-` for None."""
    lines = [list(columns), *([_cell(x) for x in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    words = [any(isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(line, widths, words, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, re.sub(r"^argument (\S+): ", r"\1 is ", message) + "\n")


def number(low: float, high: float, *, whole: bool = False) -> Callable[[str], float]:
    """Reads a finite number from `low` to `high`, both allowed."""

    def read(text: str) -> float:
        kind = "whole number" if whole else "number"
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            wanted = f"a {kind} from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text}, expected {wanted}")
        return value

    return read
