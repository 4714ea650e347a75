"""The commands `ft-autotune verify` and `report`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from autotune.ops import chosen
from autotune.progress import compiling, state_file
from autotune.tables import pairs, print_rows

_ARCHES = click.Choice(("89", "90", "120"))
_MOST_WORK = 5e9  # of a call that an interpreter gets through in a minute
_QUICK_WORK = 3e7
_QUICK_KEYS = 1  # of an op


@click.command()
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@click.option(
    "--arch",
    type=_ARCHES,
    default="89",
    show_default=True,
    help="Capability times ten.",
)
@click.option("--quick", is_flag=True, help="The smallest key of each op.")
def verify(ops: tuple[str, ...], arch: str, quick: bool) -> None:
    """Run the shipped entries of the named ops (without names: all) by value.

    Interpreted, or on the card when there is one. Exits 1 with a list of what is wrong.
    """
    import torch

    from autotune import verify as verifying
    from ftkernels import backend, config, target

    specs = chosen(ops)
    has_card = torch.cuda.is_available() and not backend.interpreted()
    if not has_card and not backend.interpreted():
        raise SystemExit(_interpreted("verify", *ops, "--arch", arch, *["--quick"] * quick))
    gpu = target.of_arch(int(arch)).name
    names = [spec.name for spec in specs]
    found = verifying.entries(config.folder(), gpu, names)
    most = float("inf") if has_card else _QUICK_WORK if quick else _MOST_WORK
    if quick:
        found = verifying.smallest_keys(found, _QUICK_KEYS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verify", total=len(found))

        def advance(op: str) -> None:
            progress.update(task, description=f"verify {op}", advance=1)

        checked = verifying.verify(
            found, arch=int(arch), device="cuda" if has_card else "cpu", most_work=most,
            advance=advance,
        )  # fmt: skip
    wrong = [f"{x.op} {pairs(x.key)}: {x.error}" for x in checked if x.error]
    wrong += [f"{x}: no entries" for x in verifying.damaged(config.folder(), gpu, names)]
    for line in wrong:
        click.echo(line)
    ran = sum(x.ran for x in checked)
    click.echo(f"{len(checked)} entries looked up, {ran} of them run by value")
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {len(checked)} entries and files are wrong")


def _interpreted(*arguments: str) -> int:
    """This command in a process whose kernels are interpreted."""
    from ftkernels import backend

    environment = {**os.environ, **backend.interpreting()}
    return subprocess.run(
        [sys.executable, "-m", "autotune", *arguments], env=environment, check=False
    ).returncode


@click.command()
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@click.option(
    "--arch",
    type=_ARCHES,
    default="89",
    show_default=True,
    help="Capability times ten.",
)
@click.option("--jobs", type=click.IntRange(1), help="Processes that compile; default: all cores.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
def report(ops: tuple[str, ...], arch: str, jobs: int | None, as_json: bool) -> None:
    """Before and after: each key's default and its shipped entry, and what their kernels use."""
    from autotune import report as reporting
    from autotune import search as searching
    from autotune import verify as verifying
    from ftkernels import backend, config, target

    specs = chosen(ops)
    if backend.interpreted():
        raise click.ClickException("TRITON_INTERPRET is on, expected a process without it")
    gpu = target.of_arch(int(arch)).name
    found = searching.problems(specs, arch=int(arch))
    shipped = verifying.entries(config.folder(), gpu, [spec.name for spec in specs])
    entries = {(op, config.entry_key(entry["key"])): entry for op, entry in shipped}
    with compiling(found, int(arch), state_file(gpu), jobs) as setup:
        rows = reporting.rows(found, entries, setup)
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows]))
    else:
        print_rows(rows)
