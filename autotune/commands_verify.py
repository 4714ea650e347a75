"""The commands `ft-autotune verify` and `report`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import click

from autotune.ops import (
    arch_option,
    chosen,
    jobs_option,
    out_option,
    require_compiler,
    state_option,
)
from autotune.progress import compiling, counting, state_file
from autotune.settings import tell_changed
from autotune.tables import counted, pairs

if TYPE_CHECKING:
    from ftkernels import KernelSpec

_Needed = Literal["keys", "files", "nothing"]
_MOST_WORK = 5e9  # of a call that an interpreter gets through in a minute
_QUICK_WORK = 3e7
_QUICK_KEYS = 1  # of an op


@click.command()
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@arch_option
@out_option
@click.option("--quick", is_flag=True, help="The smallest key of each op.")
def verify(ops: tuple[str, ...], arch: str, out: Path | None, quick: bool) -> None:
    """Run the entries of the named ops (without names: all) by value.

    Interpreted, or on the card when there is one. Exits 1 with a list of what is wrong, also when a
    key that has a choice has no entry; with --out it may, and without names an op its file.
    """
    specs = chosen(ops)
    import torch

    from ftkernels import backend, config

    has_card = torch.cuda.is_available() and not backend.interpreted()
    if not has_card and not backend.interpreted():
        options = [*(["--out", str(out)] if out else []), *["--quick"] * quick]
        _interpreted("verify", *ops, "--arch", arch, *options)
    needed: _Needed = "keys" if out is None else "files" if ops else "nothing"
    with config.reading(out or config.folder()):
        _verify(specs, int(arch), quick, needed=needed, has_card=has_card)


def _verify(
    specs: Sequence[KernelSpec], arch: int, quick: bool, *,
    needed: _Needed, has_card: bool,
) -> None:  # fmt: skip
    """Verify what stands in the folder, `needed`: of what has a choice."""
    from autotune import entries
    from autotune import verify as verifying
    from ftkernels import config

    folder = _folder_of(arch)
    by_key = verifying.cases(arch)
    names = {x.name for x in specs}
    keys = [(op, key) for (op, key), x in by_key.items() if len(x.candidates) > 1 and op in names]
    found = entries.read(config.folder(), folder.name, specs)
    wrong = entries.lost(folder, [] if needed == "nothing" else dict.fromkeys(op for op, _ in keys))
    wrong += entries.unserved(found, keys if needed == "keys" else [])
    if quick:
        found = replace(found, taken=verifying.smallest_keys(found.taken, _QUICK_KEYS))
    most = float("inf") if has_card else _QUICK_WORK if quick else _MOST_WORK
    with counting("verify", len(found.taken) + len(found.spare)) as advance:
        checked = verifying.verify(
            found, by_key, arch=arch, device="cuda" if has_card else "cpu", most_work=most,
            advance=advance,
        )  # fmt: skip
    wrong += found.wrong
    wrong += [f"{x.op}.json: {pairs(x.key)}: {x.error}" for x in checked if x.error]
    for line in wrong:
        click.echo(line)
    ran = sum(x.ran for x in checked)
    looked_up = counted(len(checked), "entry", "entries")
    click.echo(f"{looked_up} looked up, {ran} run by value, {len(wrong)} failed")
    _require_none(wrong, folder)


def _folder_of(arch: int) -> Path:
    from autotune import entries
    from ftkernels import config, target

    try:
        return entries.require_folder(config.folder(), target.of_arch(arch).name)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _interpreted(*arguments: str) -> NoReturn:
    """Go on as this command, by a fresh interpreter of Python whose kernels are interpreted."""
    from ftkernels import backend

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    environment = {**os.environ, **backend.interpreting()}
    os.execve(sys.executable, [sys.executable, "-m", "autotune", *arguments], environment)


@click.command()
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@arch_option
@out_option
@jobs_option
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
def report(
    ops: tuple[str, ...], arch: str, out: Path | None, jobs: int | None, state: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Before and after: each key's default and its entry, and what their kernels use.

    What the file of --state holds is not compiled again, what is compiled is added to it. Without
    --state it is the file of tune, which is only read while another process has it.
    """
    specs = chosen(ops)
    require_compiler()
    tell_changed()
    from ftkernels import config

    with config.reading(out or config.folder()):
        if out:
            _folder_of(int(arch))
        _report(specs, arch, jobs, state, as_json)


def _report(
    specs: Sequence[KernelSpec], arch: str, jobs: int | None, state: Path | None, as_json: bool
) -> None:  # fmt: skip
    from autotune import entries
    from autotune import report as reporting
    from autotune import search as searching
    from autotune.report_tables import print_rows
    from ftkernels import config, target

    gpu = target.of_arch(int(arch)).name
    problems = searching.problems(specs, arch=int(arch))
    found = entries.read(config.folder(), gpu, specs)
    by_key = {(op, config.entry_key(entry["key"])): entry for op, entry in found.taken}
    kept = state or state_file(gpu)
    with compiling(problems, int(arch), kept, jobs, must_keep=bool(state)) as setup:
        rows = reporting.rows(problems, by_key, setup)
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows]))
    else:
        print_rows(rows)
    for line in found.wrong:
        click.echo(f"ft-autotune: {line}", err=True)
    _require_none(found.wrong, config.folder() / gpu)


def _require_none(wrong: Sequence[str], folder: Path) -> None:
    if wrong:
        what = counted(len(wrong), "entry or file", "entries or files")
        verb = "is" if len(wrong) == 1 else "are"
        raise click.ClickException(f"{what} of {folder} {verb} wrong")
