"""Logging of every ftruntime process: stdlib loggers, `event key=value`, one line an event."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
_ROOTS = ("ftruntime", "ftkernels")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Handler(logging.StreamHandler[TextIO]):
    """Our own handler, so that a second `setup` finds and replaces it."""


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # other handlers see the same record
        own = logging.makeLogRecord(record.__dict__)
        own.levelname = record.levelname.lower()
        return super().format(own)


def setup(level: str = "info", stream: TextIO | None = None) -> None:
    """Send the lines of our loggers to `stream` (None: stderr), replacing an earlier setup.

    Raises:
        ValueError: `level` is not one of `LEVELS`.
    """
    if level not in LEVELS:
        raise ValueError(f"log level is {level!r}, expected one of {', '.join(LEVELS)}")
    handler = _Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Formatter(_FORMAT))
    for name in _ROOTS:
        logger = logging.getLogger(name)
        for old in [h for h in logger.handlers if isinstance(h, _Handler)]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False


def level_name(name: str = "ftruntime") -> str:
    """The one of `LEVELS` that a child process needs to say as much as this one."""
    number = logging.getLogger(name).getEffectiveLevel()
    for level in LEVELS:
        if number <= logging.getLevelName(level.upper()):
            return level
    return LEVELS[-1]
