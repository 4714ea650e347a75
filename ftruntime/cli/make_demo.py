"""``ftruntime make-demo``: a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from ftruntime import log
from ftruntime.cli.common import progress_bar
from ftruntime.cli.group import FAILED, USAGE, Failure, refusals
from ftruntime.flags import FlagSpec, checked, parse

_SEED = FlagSpec(kind="int", help="Seed of all weights.", default=0, low=0)
PRESET = FlagSpec(
    kind="str", help="small (head 128) or tiny (head 64).", default="small",
    choices=("small", "tiny"),
)  # fmt: skip


@click.command("make-demo")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--seed", default="0", metavar="N", help=_SEED.help_line)
@click.option("--preset", default="small", metavar="small|tiny", help=PRESET.help_line)
@click.option("--force", is_flag=True, help="Replace a demo checkpoint that is already there.")
def make_demo(directory: Path, seed: str, preset: str, force: bool) -> None:
    """Write a tiny random checkpoint in the official format to DIR."""
    with refusals(USAGE):
        number = checked("seed", parse(seed, _SEED), _SEED)
        checked("preset", preset, PRESET)
    log.setup()
    from ftruntime import demo

    with refusals(FAILED), progress_bar(f"writing {directory}") as progress:
        try:
            demo.make_demo(
                directory, seed=int(number or 0), preset=preset, force=force, progress=progress
            )
        except FileExistsError as error:
            raise Failure(str(error), USAGE) from error
    click.echo(str(directory))
