"""The ``ft-autotune`` command.

Data goes to stdout, progress and refusals to stderr. Exit codes: 0 fine, 1 failed, 2 a wrong
command line. Every refusal is one sentence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

try:
    import click
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    from autotune.commands_tune import tune
    from autotune.commands_verify import report, verify
    from autotune.ops import chosen
except ModuleNotFoundError as missing:
    package = str(missing.name).partition(".")[0]
    raise SystemExit(
        f"ft-autotune: package {package} is missing, expected the extra `serve`: "
        "pip install 'ftkernels[serve]'"
    ) from None

if TYPE_CHECKING:
    from autotune.inspect import LaunchRow

_FAILED = 1
_ARCHES = ("89", "90", "120")
_PIPE_COLUMNS = 240  # of a table that no terminal bounds


@click.group()
def cli() -> None:
    """Look at the kernels of ftkernels without a card, and find their configs."""


cli.add_command(tune)
cli.add_command(verify)
cli.add_command(report)


@cli.command()
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@click.option(
    "--arch", type=click.Choice(_ARCHES), default="89", show_default=True,
    help="Compute capability times ten.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
def inspect(ops: tuple[str, ...], arch: str, as_json: bool) -> None:
    """Compile every launch of the named ops (without names: all) and show what it uses.

    Exits 1 when a kernel spills or needs more shared memory than the card gives.
    """
    from autotune.inspect import inspect as inspect_launches
    from autotune.inspect import work_list
    from ftkernels import backend

    specs = chosen(ops)
    if backend.interpreted():
        raise click.ClickException("TRITON_INTERPRET is on, expected a process without it")
    work = work_list(specs)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compile", total=len(work))

        def advance(op: str) -> None:
            progress.update(task, description=f"compile {op}", advance=1)

        rows = inspect_launches(work, arch=int(arch), advance=advance)
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows]))
    else:
        _print_table(rows, arch)
    unsound = [row for row in rows if not row.is_sound]
    if unsound:
        names = sorted({row.kernel for row in unsound})
        raise click.ClickException(
            f"{len(unsound)} of {len(rows)} launches spill or do not fit: {', '.join(names)}"
        )


def _print_table(rows: Sequence[LaunchRow], arch: str) -> None:
    table = Table(title=f"launches on sm_{arch}", title_justify="left", box=None)
    for name in ("op", "case", "kernel", "config"):
        table.add_column(name, overflow="fold")
    for name in ("registers", "spill bytes", "shared bytes", "warps/SM"):
        table.add_column(name, justify="right")
    for name in ("fits", "mma", "source"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row.op, _pairs(row.case), row.kernel, _pairs(row.config),
            str(row.registers), str(row.spill_bytes), str(row.shared_bytes),
            str(row.warps_per_sm), "yes" if row.fits else "NO", row.mma or "-", row.source,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False).print(table)


def _pairs(values: object) -> str:
    assert isinstance(values, dict)
    name = [str(values["name"])] if "name" in values else []
    return " ".join([*name, *(f"{k}={v}" for k, v in values.items() if k != "name")])


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
