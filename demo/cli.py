"""What the command lines here share: arguments, the run they read, and how they end.

Exit codes: 0 fine, 1 failed, 2 a wrong command line, 128 and its number after a signal. A refusal
is one sentence on stderr.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

import click
from tokenizers import Tokenizer

from demo import state, text, tokenizer
from demo.state import State
from ftruntime.cli.group import FAILED, USAGE, Failure, refusals
from ftruntime.flags import FlagSpec, FlagValue, checked, flag_name, parse

_Command = TypeVar("_Command", bound=Callable[..., object])
SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
THREADS: Final = FlagSpec(kind="int", help="Threads of torch.", default=2, low=1, high=1024)


def run(command: click.Command, words: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    try:
        code = command.main(words, standalone_mode=False)
    except click.ClickException as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except (OSError, FloatingPointError) as error:
        click.echo(str(error), err=True)
        return FAILED
    except (click.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


class Stop:
    """The signal that asked to stop, SIGTERM or SIGINT; a second one ends at once."""

    def __init__(self) -> None:
        self.signal = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            sys.exit(128 + number)
        self.signal = number


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Keep signals from ending the process inside the block."""
    stop = Stop()
    before = {n: signal.signal(n, stop.handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def option(name: str, spec: FlagSpec) -> Callable[[_Command], _Command]:
    """An option that arrives as the type of its flag, or is refused in one sentence."""

    def value(_: click.Context, __: click.Parameter, word: str | None) -> FlagValue:
        if word is None:
            return spec.default
        with refusals(USAGE):
            return checked(name, parse(word, spec), spec)

    return click.option(
        flag_name(name), name, callback=value, metavar={"int": "N", "float": "F"}[spec.kind],
        help=spec.help_line,
    )  # fmt: skip


def new_folder(folder: Path) -> None:
    """Make `folder` where it is missing; what cannot be one ends the command."""
    if folder.exists() and not folder.is_dir():
        raise Failure(f"FOLDER is {folder}, expected a directory or a new name", USAGE)
    with refusals(FAILED):
        folder.mkdir(parents=True, exist_ok=True)


def trained_folder(command: _Command) -> _Command:
    """Add the argument FOLDER: a directory that is there."""

    def value(_: click.Context, __: click.Parameter, folder: Path) -> Path:
        if not folder.is_dir():
            raise Failure(f"FOLDER is {folder}, expected a directory of demo.train", USAGE)
        return folder

    kind = click.Path(path_type=Path)
    return click.argument("folder", metavar="FOLDER", type=kind, callback=value)(command)


unfinished_option = click.option(
    "--unfinished", is_flag=True, help="Take a run that has not come to its end."
)


@dataclass(frozen=True)
class Trained:
    """What a run left behind; the text is the held-out one."""

    state: State
    tokenizer: Tokenizer
    held_out: str


def trained(folder: Path, *, unfinished: bool) -> Trained:
    """The run in `folder`; what cannot be used, or is not asked for, ends the command."""
    file = folder / state.FILE
    if not file.exists():
        raise Failure(f"FOLDER is {folder}, expected a directory with a {state.FILE}", USAGE)
    with refusals(FAILED):
        found = state.load(folder)
    if found.tokens < found.total_tokens:
        part = f"{file} is at {found.tokens} of {found.total_tokens} tokens"
        if not unfinished:
            raise Failure(f"{part}, expected a finished run (or --unfinished)", USAGE)
        click.echo(part, err=True)
    with refusals(FAILED):
        train, held_out = text.fetch(folder)
        found.check_file(folder / text.FILE)
        codes = tokenizer.tokenizer_of(folder, [chapter.text for chapter in train])
        found.check_file(folder / tokenizer.FILE)
    return Trained(found, codes, text.join(held_out))
