"""Files of a training folder: written whole or not at all, told apart by a digest, one writer."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """A name beside `file` to write to; it takes the place of `file` when the block ends, and goes
    when the block fails.

    Raises:
        OSError: as raised inside, with the name of the file if it had none.
    """
    partial = file.with_suffix(".partial")
    try:
        yield partial
        partial.replace(file)
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder against others until the block or the process ends.

    Raises:
        BlockingIOError: another process holds it.
    """
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{folder} is trained in by another process, expected a folder of its own"
            ) from error
        yield
