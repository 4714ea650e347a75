"""The command `ft-autotune inspect`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from autotune.ops import arch_option, chosen, jobs_option, require_compiler
from autotune.progress import counting
from autotune.settings import require_default, tell_changed
from autotune.tables import counted

if TYPE_CHECKING:
    from autotune.contract import Contract
    from autotune.inspect import Item, LaunchRow
    from ftkernels import KernelSpec


@click.command()
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@arch_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
@click.option("--candidates", is_flag=True, help="Also every config that a search would try.")
@click.option("--loops", is_flag=True, help="Also a table of every loop that matters.")
@click.option(
    "--wide", is_flag=True,
    help="One table with every figure, the sizes and the config.",
)  # fmt: skip
@click.option(
    "--diff", is_flag=True,
    help="Print what differs from bench_kernels/contract.json instead; sm_89 only.",
)  # fmt: skip
@click.option(
    "--write-contract", is_flag=True,
    help="Write the figures to bench_kernels/contract.json instead; with OP theirs alone.",
)  # fmt: skip
@jobs_option
def inspect(
    ops: tuple[str, ...], arch: str, as_json: bool, candidates: bool, loops: bool, diff: bool,
    write_contract: bool, wide: bool, jobs: int | None,
) -> None:  # fmt: skip
    """Compile every launch of the named ops (without names: all) and show what it uses.

    Registers, spills and shared memory are the compiler's; all else is a static model of the
    machine code, no time. Exits 1 when a kernel spills or needs more shared memory than the card
    gives, with --diff when a figure got worse than the contract lets it.
    """
    specs = chosen(ops)
    from autotune import contract, launch_tables
    from autotune.inspect import work_list
    from ftkernels import target

    if write_contract and diff:
        raise click.UsageError("--write-contract is given with --diff, expected one of the two")
    if write_contract and as_json:
        raise click.UsageError("--write-contract is given with --json, expected one of the two")
    if (write_contract or diff) and (candidates or arch != "89"):
        other = "--candidates" if candidates else f"--arch {arch}"
        expected = "one of the two" if candidates else "--arch 89"
        flag = "--diff" if diff else "--write-contract"
        raise click.UsageError(f"{other} is given with {flag}, expected {expected}")
    if write_contract:
        require_default("a contract is written")
    work = work_list(specs, arch=int(arch), candidates=candidates)
    if write_contract or diff:
        work = [item for item in work if contract.is_held(item.case)]
    committed = _committed() if diff else None
    rows = _inspected(work, int(arch), jobs)
    if write_contract:
        _write(rows, others=bool(ops))
        return
    if committed is not None:
        _print_changes(rows, committed, specs, as_json)
        return
    if as_json:
        card = {"arch": int(arch), "card": target.of_arch(int(arch)).name}
        click.echo(json.dumps([{**row.as_dict(), **card} for row in rows]))
    else:
        launch_tables.print_launches(rows, arch, wide=wide)
        if loops:
            launch_tables.print_loops(rows, arch, wide=wide)
    # a candidate may be unsound: that is what a search finds out
    _refuse_unsound([row for row in rows if row.source != "candidate"])


def _inspected(work: Sequence[Item], arch: int, jobs: int | None) -> list[LaunchRow]:
    from autotune.inspect import inspect as inspect_launches
    from autotune.workers import Stopped

    require_compiler()
    tell_changed()
    with counting("compile", len(work)) as advance:
        try:
            return inspect_launches(work, arch=arch, advance=advance, jobs=jobs)
        except Stopped as error:
            raise click.ClickException(str(error)) from error


def _refuse_unsound(rows: Sequence[LaunchRow]) -> None:
    unsound = [row for row in rows if not row.is_sound]
    if unsound:
        names = sorted({row.figures.kernel for row in unsound})
        raise click.ClickException(
            f"{len(unsound)} of {len(rows)} launches spill or do not fit: {', '.join(names)}"
        )


def _committed() -> Contract:
    import triton

    from autotune import contract

    try:
        committed = contract.read()
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if triton.__version__ != committed.triton:
        raise click.ClickException(
            f"triton is {triton.__version__}, expected {committed.triton}, which the contract is of"
        )
    return committed


def _write(rows: Sequence[LaunchRow], *, others: bool) -> None:
    from autotune import contract

    _refuse_unsound(rows)
    if not rows:
        raise click.UsageError("OP has no case that the contract holds, expected one that has")
    try:
        count = contract.write(rows, others=others)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(
            f"contract: {contract.COMMITTED} cannot be written ({error.strerror}), expected a "
            "file to replace"
        ) from None
    click.echo(f"ft-autotune: {count} launches in {contract.NAME}", err=True)


def _print_changes(
    rows: Sequence[LaunchRow], committed: Contract, specs: Sequence[KernelSpec], as_json: bool
) -> None:
    from autotune import contract, launch_tables

    found, strays = committed.changes(rows), committed.strays(specs)
    ignored, num_left_out = contract.ignored(specs), contract.num_left_out(specs)
    if as_json:
        value = {
            "source": "modelled", "changes": [vars(change) for change in found],
            "strays": strays, "ignored": ignored or None, "left_out": num_left_out,
        }  # fmt: skip
        click.echo(json.dumps(value))
    elif found:
        launch_tables.print_changes(found, contract.NAME)
    elif not strays:
        click.echo(f"none of {len(rows)} launches differs from {contract.NAME}")
    if num_left_out and not as_json:
        launches = counted(num_left_out, "launch", "launches")
        click.echo(f"left out of {contract.NAME}, so not compared: {launches}")
    failing = [str(change) for change in found if change.fails]
    ways_out = [contract.way_out(op) for op in dict.fromkeys(x.op for x in found if x.fails)]
    for sentence in (*failing, *strays, *ways_out, *filter(None, [ignored])):
        click.echo(f"ft-autotune: {sentence}", err=True)
    if failing or strays:
        worse = counted(len(failing), "figure is worse", "figures are worse")
        worse += " than the contract allows"
        other = counted(len(strays), "case has", "cases have") + " other launches"
        told = [line for line, there in ((worse, failing), (other, strays)) if there]
        raise click.ClickException(", ".join(told))
