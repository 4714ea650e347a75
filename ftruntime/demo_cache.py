"""The demo checkpoint that stands in where no model is named: made once, kept in a cache."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "ftkernels"

_logger = logging.getLogger(__name__)


def version() -> str:
    """Version of the installed distribution."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def demo_directory() -> Path:
    """Where this version keeps its demo checkpoint: in XDG_CACHE_HOME, else in ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "ftruntime" / f"demo-{version()}"


def ensure_demo(progress: Callable[[str, float], None] | None = None) -> Path:
    """The demo checkpoint, written first if it is not there.

    Args:
        progress: as in `ftruntime.demo.make_demo`.

    Raises:
        OSError: the cache directory cannot be written.
    """
    directory = demo_directory()
    if _complete(directory):
        return directory
    from ftruntime.demo import make_demo

    _logger.info("no model given, writing a demo checkpoint path=%s", directory)
    try:
        make_demo(directory, progress=progress)
    except FileExistsError:
        # another process made it meanwhile: it appears whole or not at all
        if not _complete(directory):
            raise
    except OSError as error:
        raise OSError(
            f"{directory} cannot be written ({error.strerror}), expected a cache directory: set "
            "XDG_CACHE_HOME or name a model"
        ) from error
    return directory


def _complete(directory: Path) -> bool:
    return (directory / "config.json").is_file()
