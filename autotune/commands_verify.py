"""The commands `ft-autotune verify` and `report`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click

from autotune.ops import arch_option, chosen, jobs_option, require_compiler
from autotune.progress import compiling, counting, state_file
from autotune.tables import pairs, print_rows

_MOST_WORK = 5e9  # of a call that an interpreter gets through in a minute
_QUICK_WORK = 3e7
_QUICK_KEYS = 1  # of an op


@click.command()
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@arch_option
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
    with counting("verify", len(found)) as advance:
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
@arch_option
@jobs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
def report(ops: tuple[str, ...], arch: str, jobs: int | None, as_json: bool) -> None:
    """Before and after: each key's default and its shipped entry, and what their kernels use."""
    from autotune import report as reporting
    from autotune import search as searching
    from autotune import verify as verifying
    from ftkernels import config, target

    specs = chosen(ops)
    require_compiler()
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
