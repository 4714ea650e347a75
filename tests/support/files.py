"""What a directory holds."""

from __future__ import annotations

from pathlib import Path


def files_of(directory: Path) -> dict[str, Path]:
    """Every file below `directory` by its name relative to it."""
    return {
        path.relative_to(directory).as_posix(): path
        for path in directory.rglob("*") if path.is_file()
    }  # fmt: skip
