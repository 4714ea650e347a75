"""What is installed: the distribution's name and version, and the demo checkpoint it brings."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "ftkernels"
DEMO_DIRECTORY: Final = Path(__file__).parent / "demo" / "demo-kjv"


def version() -> str:
    """Version of the installed distribution."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def demo_directory() -> Path:
    """The trained demo checkpoint, which stands in where no model is named.

    Raises:
        FileNotFoundError: this installation lacks it.
    """
    if not (DEMO_DIRECTORY / "config.json").is_file():
        raise FileNotFoundError(
            f"{DEMO_DIRECTORY} is missing, expected the demo checkpoint of this installation: name "
            "a model"
        )
    return DEMO_DIRECTORY
