"""The ``ft-autotune`` command.

Data goes to stdout, progress and refusals to stderr. Exit codes: 0 fine, 1 failed, 2 a wrong
command line. Every refusal is one sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


@click.group()
def cli() -> None:
    """Look at the kernels of ftkernels without a card, and find their configs."""


cli.add_command(inspect)
cli.add_command(tune)
cli.add_command(verify)
cli.add_command(report)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    try:
        cli.main(args, prog_name="ft-autotune", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"ft-autotune: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("ft-autotune: interrupted", err=True)
        sys.exit(_FAILED)
    sys.exit(0)
