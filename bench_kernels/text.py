"""Tables, progress and command lines in plain text: an interpreter may have torch only."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TextIO

Cell = str | float | int | None
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LINE_S = 10.0  # between two lines of progress where no terminal is


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


def shown(word: str) -> str:
    """A wrong value as a sentence can hold it: in quotes where it would not be seen."""
    return word if word.strip() and word.isprintable() else repr(word)


def number(low: float, high: float, *, whole: bool = False) -> Callable[[str], float]:
    """Reads a finite number from `low` to `high`, both allowed."""

    def read(text: str) -> float:
        kind = "whole number" if whole else "number"
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            ends = f"{low} to {high}" if whole else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{shown(text)}, expected a {kind} from {ends}")
        return value

    return read


@contextlib.contextmanager
def progress(
    stream: TextIO | None, now: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], None]]:  # fmt: skip
    """A function to be told what is done: one line that changes on a terminal, which is empty in
    the end; elsewhere a line now and then, the first one too.
    """
    terminal = stream is not None and stream.isatty()
    last: float | None = None

    def tell(line: str) -> None:
        nonlocal last
        if terminal:
            print(f"\r\x1b[K{line}", end="", file=stream, flush=True)
        elif stream is not None and (last is None or now() - last >= _LINE_S):
            last = now()
            print(line, file=stream, flush=True)

    try:
        yield tell
    finally:
        if terminal:
            tell("")


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command and exit; a reader that left ends it in silence, a full disk in a sentence."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # what is still buffered would fail once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"stdout cannot be written ({error.strerror})", file=sys.stderr)
        code = 1
    sys.exit(code)
