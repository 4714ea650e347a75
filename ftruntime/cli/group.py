"""The group of commands, and how each of them ends: a code, and one sentence where it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence

import click

from ftruntime.plan import NotEnoughMemoryError
from ftruntime.types import EngineFailedError

FAILED, USAGE, _INTERRUPTED = 1, 2, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Failure(click.ClickException):
    """Ends the command with one sentence on stderr and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


class Group(click.Group):
    """A command group whose refusals are one sentence, without click's usage lines around it."""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: object,
    ) -> object:
        try:
            with _writable_stdout():
                code = super().main(
                    args, prog_name or "ftruntime", complete_var, standalone_mode=False, **extra
                )
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help() if error.ctx else "", err=True)
            code = USAGE
        except click.ClickException as error:
            click.echo(error.format_message(), err=True)
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = _INTERRUPTED
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def _writable_stdout() -> Iterator[None]:
    """A full disk behind stdout is one sentence; a reader that left ends the command in silence."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # what is still buffered would fail once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise Failure(f"stdout cannot be written ({error.strerror})", FAILED) from error


@contextlib.contextmanager
def refusals(exit_code: int) -> Iterator[None]:
    """Refusals raised inside end the command with this code; anything else is a bug and shows
    where it is.
    """
    try:
        yield
    except (NotEnoughMemoryError, EngineFailedError) as error:
        raise Failure(str(error), FAILED) from error
    except OSError as error:
        if error.filename is None:
            raise Failure(str(error), exit_code) from error
        sentence = f"{error.filename} cannot be opened or written ({error.strerror})"
        raise Failure(sentence, exit_code) from error
    except ValueError as error:
        raise Failure(str(error), exit_code) from error
