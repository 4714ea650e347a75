"""What several commands need: the shape of a checkpoint, a progress bar, lines of the log."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from ftruntime.cli.group import FAILED, USAGE, Failure, refusals
from ftruntime.config import RuntimeConfig
from ftruntime.model.config import ModelConfig

_logger = logging.getLogger(__package__)


def checkpoint_shape(config: RuntimeConfig, other_models: str = "") -> ModelConfig:
    """The shape of the checkpoint that was named; what cannot be read ends the command.

    Args:
        other_models: what the command takes besides, as its sentence goes on.
    """
    directory = Path(str(config.model))
    if not directory.is_dir():
        expected = f"a checkpoint directory{other_models}"
        raise Failure(f"--model is {directory}, expected {expected}", USAGE)
    with refusals(FAILED):
        return ModelConfig.from_dir(directory)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda name, share: bar.update(task, completed=share, description=f"{title} {name}")


@contextlib.contextmanager
def tidy_end() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind what runs within, so that it removes what it has begun; the exit
    code is 128 and the signal's number.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def log_lines(notes: Sequence[str], warnings: Sequence[str]) -> None:
    """What a plan has to say."""
    for line in notes:
        _logger.info("%s", line)
    for line in warnings:
        _logger.warning("%s", line)
