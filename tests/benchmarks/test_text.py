"""What the benches print: tables, progress, and how a command ends when nobody can read it.

Mutants run, each noticed: nothing told into a pipe, every line told into a pipe, a line left on a
terminal, a full disk raised, a reader that left as an error.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from bench_kernels import text

ROOT = Path(__file__).parents[2]
LISTS = ("-m", "bench_kernels.roofline", "--top", "200", "--json")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_is_told_now_and_then():
    stream, seconds = io.StringIO(), iter(range(0, 100, 4))
    clock = {"now": 0.0}
    with text.progress(stream, lambda: clock["now"]) as tell:
        for number in range(8):
            clock["now"] = float(next(seconds))
            tell(f"{number}/8")
    # at 0 s, then 10 s after the last one at the earliest: 12 s, 24 s
    assert stream.getvalue() == "0/8\n3/8\n6/8\n"


def test_a_terminal_has_one_line_that_goes():
    stream = Terminal()
    with text.progress(stream) as tell:
        tell("1/2")
        tell("2/2")
    assert stream.getvalue() == "\r\x1b[K1/2\r\x1b[K2/2\r\x1b[K"


def test_no_stream_is_told_nothing():
    with text.progress(None) as tell:
        tell("1/2")


@pytest.mark.parametrize("words", [LISTS, ("-m", "bench_kernels", "rms_norm")])
def test_a_full_disk_behind_stdout_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "stdout cannot be written (No space left on device)\n"


def test_a_closed_stdout_and_a_reader_that_left_are_silent():
    line = f"{sys.executable} {' '.join(LISTS)}"
    for command in (f"{line} >&-", f"{line} | true"):
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), command
