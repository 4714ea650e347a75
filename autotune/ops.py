"""What command lines have in common: the ops they name, the card, and what compiling needs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ftkernels import KernelSpec

_MOST_SHOWN = 40  # characters of a wrong value
ARCHES = click.Choice(("89", "90", "120"))
arch_option = click.option(
    "--arch", type=ARCHES, default="89", show_default=True, help="Compute capability times ten."
)
out_option = click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the entries; default: where serving reads them, configs in the package "
    "ftkernels.",
)  # fmt: skip
state_option = click.option(
    "--state", type=click.Path(path_type=Path, dir_okay=False),
    help="File that a killed run goes on from; default: in ~/.cache/ftkernels. It holds what was "
    "compiled; what a card measured is measured again.",
)  # fmt: skip
jobs_option = click.option(
    "--jobs", type=click.IntRange(1), help="Processes that compile; default: all cores."
)


def shown(value: str) -> str:
    """A wrong value as a sentence can hold it: its beginning, quoted where it would not be seen."""
    short = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}..."
    return short if short.strip() and short.isprintable() else repr(short)


def chosen(ops: Sequence[str]) -> list[KernelSpec]:
    """The named ops; without names every op that has kernels.

    Called before anything else of ftkernels is imported.

    Raises:
        UsageError: no such op, or one that runs its reference only.
        ClickException: `FTKERNELS_BACKEND` leaves this process no kernels.
    """
    _require_kernels()
    from ftkernels import registry

    known = {spec.name: spec for spec in registry()}
    for op in ops:
        if op not in known:
            near = difflib.get_close_matches(op, known, n=3)
            hint = ", ".join(near) or "those that `ft-autotune tune --dry-run` lists"
            raise click.UsageError(f"OP is {op!r}, expected the name of an op, such as {hint}")
        if not known[op].kernel:
            raise click.UsageError(
                f"OP is {op!r}, which runs its reference only, expected an op with kernels"
            )
    return [known[op] for op in dict.fromkeys(ops)] or [
        spec for spec in known.values() if spec.kernel
    ]


def _require_kernels() -> None:
    try:
        from ftkernels import backend
    except ValueError as error:  # a value that it does not know
        raise click.ClickException(str(error)) from None
    if backend.always_reference():
        raise click.ClickException(
            "FTKERNELS_BACKEND is 'reference', which runs no kernels, expected it unset"
        )


def require_compiler() -> None:
    """Refuse a process whose kernels are interpreted.

    Raises:
        ClickException: it is one.
    """
    from ftkernels import backend

    if backend.interpreted():
        raise click.ClickException("TRITON_INTERPRET is on, expected a process without it")
