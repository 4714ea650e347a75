"""``ftruntime make-demo``: the trained demo checkpoint, or a random one."""

from __future__ import annotations

from pathlib import Path

import click

from ftruntime import log
from ftruntime.cli.common import progress_bar, tidy_end
from ftruntime.cli.group import FAILED, USAGE, Failure, refusals
from ftruntime.flags import FlagSpec, checked, parse, refuse

_SEED = FlagSpec(kind="int", help="Seed of random weights.", default=0, low=0)
PRESET = FlagSpec(
    kind="str", help="Shape of a random one: small (head 128) or tiny (head 64).", default="small",
    choices=("small", "tiny"),
)  # fmt: skip


@click.command("make-demo")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--random", "is_random", is_flag=True, help="Random weights in place of the trained ones."
)
@click.option("--seed", metavar="N", help=_SEED.help_line)
@click.option("--preset", metavar="small|tiny", help=PRESET.help_line)
@click.option("--force", is_flag=True, help="Replace a demo checkpoint that is already there.")
def make_demo(
    directory: Path, is_random: bool, seed: str | None, preset: str | None, force: bool
) -> None:
    """Write the trained demo checkpoint, which `serve` takes when no model is named, or a small
    random one to DIR, in the official format.
    """
    with refusals(USAGE):
        for name, value in (("seed", seed), ("preset", preset)):
            if value is not None and not is_random:
                refuse(name, value, "it unset without --random")
        number = checked("seed", parse(seed or "0", _SEED), _SEED)
        shape = str(checked("preset", preset or "small", PRESET))
    log.setup()
    from ftruntime import demo

    with refusals(FAILED), tidy_end(), progress_bar(f"writing {directory}") as progress:
        try:
            if is_random:
                demo.make_demo(
                    directory, seed=int(number or 0), preset=shape, force=force, progress=progress
                )
            else:
                demo.copy_demo(directory, force=force)
        except FileExistsError as error:
            raise Failure(str(error), USAGE) from error
    click.echo(str(directory))
