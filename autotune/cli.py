"""The ``ft-autotune`` command.

Data goes to stdout, progress and refusals to stderr. Exit codes: 0 fine, 1 failed, 2 a wrong
command line, 130 and 143 ended by Ctrl-C and SIGTERM. Every refusal is one sentence.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

try:
    import click

    from autotune.commands_inspect import inspect
    from autotune.commands_tune import tune
    from autotune.commands_verify import report, verify
except ModuleNotFoundError as missing:
    package = str(missing.name).partition(".")[0]
    raise SystemExit(
        f"ft-autotune: package {package} is missing, expected the extra `serve`: "
        "pip install 'ftkernels[serve]'"
    ) from None

_FAILED = 1
_ENDING = (signal.SIGINT, signal.SIGTERM)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False,
              callback=lambda context, _, asked: _print_version(context) if asked else None,
              help="Show the version and exit.")  # fmt: skip
def cli() -> None:
    """Look at the kernels of ftkernels without a card, and find their configs."""


cli.add_command(inspect)
cli.add_command(tune)
cli.add_command(verify)
cli.add_command(report)


def _print_version(context: click.Context) -> NoReturn:
    import ftkernels

    click.echo(f"ft-autotune, version {ftkernels.__version__}")
    context.exit()


class _Terminated(BaseException):
    """SIGTERM came."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    _open_streams()
    before = {number: signal.signal(number, _end) for number in _ENDING}
    try:
        cli.main(args, prog_name="ft-autotune", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        click.echo(f"ft-autotune: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("ft-autotune: interrupted", err=True)
        sys.exit(128 + signal.SIGINT)
    except _Terminated:
        click.echo("ft-autotune: terminated", err=True)
        sys.exit(128 + signal.SIGTERM)
    except OSError as error:
        if error.errno != errno.EPIPE:
            said = ": ".join(str(x) for x in (error.filename, error.strerror or error) if x)
            click.echo(f"ft-autotune: {said}", err=True)
        sys.exit(_FAILED)
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            for number, handler in before.items():
                signal.signal(number, handler)
    sys.exit(0)


def _end(number: int, frame: FrameType | None) -> None:
    # what is under way ends at once, so that a second signal has nothing to add
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else _Terminated


def _open_streams() -> None:
    """Stand in for a closed stdout or stderr, whose number a file would get otherwise."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
