"""The command `ft-autotune tune`."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.ops import (
    ARCHES,
    chosen,
    jobs_option,
    out_option,
    require_compiler,
    shown,
    state_option,
)
from autotune.progress import compiling, measuring, state_file
from autotune.settings import require_default, tell_changed
from autotune.tables import counted, print_changed, print_problems, print_summaries

if TYPE_CHECKING:
    from autotune.tune import Card


def _ranks(value: str) -> list[int]:
    from autotune.search import known_ranks

    known = {str(size): size for size in known_ranks()}
    parts = [part.strip() for part in value.split(",")]
    if not all(part in known for part in parts):
        sizes = ", ".join(known)
        raise click.UsageError(f"--tp is {shown(value)}, expected some of {sizes}, such as 1,8")
    return [known[part] for part in parts]


@click.command()
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@click.option("--arch", type=ARCHES, help="Capability times ten; default: the card's, or 89.")
@click.option(
    "--tp", "sizes", default="1,2,4,8", show_default=True,
    help="Sizes of the TP group.",
)  # fmt: skip
@out_option
@jobs_option
@click.option(
    "--top", type=click.IntRange(1), default=5, show_default=True,
    help="Candidates of a key that a card measures.",
)  # fmt: skip
@state_option
@click.option("--dry-run", is_flag=True, help="Say what there is to try, and compile nothing.")
def tune(
    ops: tuple[str, ...], arch: str | None, sizes: str, out: Path | None,
    jobs: int | None, top: int, state: Path | None, dry_run: bool,
) -> None:  # fmt: skip
    """Find the config of every key of the named ops (without names: all) and write it down.

    Candidates are compiled, the unsound dropped, the rest ranked by a static model. With a card
    the best are measured. Without one a candidate becomes the choice when the model gives it at
    least 15 % less time than the default, its margin, and those of a key are not compiled where
    none could: the default takes at most as much more than the card's bandwidth and peak allow, or
    the model only guesses at its loops. Not for a process that serves.
    """
    specs, ranks = chosen(ops), _ranks(sizes)
    require_compiler()
    from autotune import search as searching
    from autotune import tune as tuning
    from ftkernels import config, target

    root = out or config.folder()
    if not dry_run and root.resolve() == config.folder().resolve():
        require_default("shipped entries are written")
    tell_changed()
    card, of_card = _card(top, None if arch is None else int(arch))
    number = of_card or int(arch or 89)
    gpu = target.config_name() if card else target.of_arch(number).name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # entries that are stale are those to be made again
        found = searching.problems(specs, arch=number, ranks=ranks)
    if dry_run:
        print_problems(found)
        return
    start = time.monotonic()
    with _writing(root):
        _require_writable(root, gpu, dict.fromkeys(problem.op for problem in found))
    with compiling(found, number, state or state_file(gpu), jobs, prune=card is None) as setup:
        choices = tuning.search(found, setup)
    lost, total = "", len(found)
    if card:
        choices, lost = measuring(choices, card)
        found = found[: len(choices)]
    with _writing(root):
        paths = tuning.write(choices, root, gpu, card)
    print_summaries(tuning.summaries(found, choices), card is not None)
    print_changed(choices)
    click.echo(
        f"wrote {counted(len(paths), 'file', 'files')} in {time.monotonic() - start:.0f} s",
        err=True,
    )
    if lost:
        raise click.ClickException(
            f"{lost}; what it measured before is written, {len(found)} of {total} keys"
        )
    unsound = sum(choice is None for choice in choices)
    if unsound:
        raise click.ClickException(
            f"{counted(unsound, 'key has', 'keys have')} no sound config, not even the default"
        )


def _require_writable(root: Path, gpu: str, ops: Iterable[str]) -> None:
    """Refuse a folder before a search whose result would have nowhere to go."""
    from autotune import store

    store.check(root, gpu, ops)
    (root / gpu).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root / gpu):
        pass


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    """What the folder of entries cannot take is one sentence."""
    try:
        yield
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(
            f"--out is {root}, expected a folder that can be written: {error.strerror}"
        ) from None


def _card(top: int, arch: int | None) -> tuple[Card | None, int | None]:
    """The card that measures and its capability; none when another one is asked for."""
    import torch

    from autotune.tune import Card
    from ftkernels import target
    from ftkernels.testing.timer import CudaTimer

    if not torch.cuda.is_available():
        return None, None
    major, minor = torch.cuda.get_device_capability()
    number, name = 10 * major + minor, torch.cuda.get_device_name()
    if arch not in (None, number):
        return None, None
    if number not in target.TARGETS:
        known = ", ".join(f"{n // 10}.{n % 10}" for n in target.TARGETS)
        raise click.ClickException(
            f"the card is {name} of capability {major}.{minor}, expected {known}; "
            "--arch 89 models one without it"
        )
    return Card(CudaTimer(), name, _driver(), top), number


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
