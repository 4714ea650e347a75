"""How `ft-autotune` ends when it is told to, and when nobody takes what it prints.

Mutants tried: no handler of SIGTERM, a second Ctrl-C let through, the handlers left behind, an
error of stdout let through to the end of the process, `-h` unknown.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import cli

ROOT = Path(__file__).parents[2]
# the group says that it is inside, and takes its time to end
SLOW = """
import sys, time
from autotune import cli
@cli.cli.command()
def slow():
    try:
        print("inside", flush=True)
        time.sleep(60)
    finally:
        print("ending", flush=True)
        time.sleep(0.5)
cli.main(["slow"])
"""


def _start(*command: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, text=True, stdout=stdout, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=str,
)
def test_a_signal_ends_it_in_one_sentence_and_a_second_adds_nothing(number, status, word):
    process = _start("-c", SLOW)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    process.send_signal(number)
    assert process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert err.strip() == f"ft-autotune: {word}"
    assert process.returncode == status


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_full_disk_below_stdout_is_one_sentence():
    with open("/dev/full", "w") as full:
        process = _start("-m", "autotune", "--help", stdout=full.fileno())
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, "ft-autotune: No space left on device\n")


def test_a_reader_that_left_is_no_error_worth_a_word():
    read, write = os.pipe()
    os.close(read)
    process = _start("-m", "autotune", "--help", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, "")


def test_a_closed_stdout_is_no_error():
    table = (
        "import sys; sys.stdout = None\n"
        "from autotune import cli, tables\n"
        "cli.cli.command('t')(lambda: tables.print_problems([]))\n"
        "cli.main(['t'])"
    )
    process = _start("-c", table)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    "command", [(), ("tune",), ("verify",), ("report",), ("inspect",)], ids=str
)
def test_help_has_a_short_name(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "-h"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: ft-autotune")
