"""Set-up of logging: one line an event, lower-case level, no line twice."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from ftruntime import log


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("ftruntime", "ftkernels")]
    before = [(lg, lg.level, lg.propagate, list(lg.handlers)) for lg in loggers]
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def test_one_line_an_event_at_and_above_the_level() -> None:
    first, second = io.StringIO(), io.StringIO()
    log.setup("debug", first)
    log.setup("info", second)  # replaces the first
    logger = logging.getLogger("ftruntime.engine.loop")
    logger.debug("not shown")
    logger.info("decode steps=%d seqs=%d", 20, 3)
    assert first.getvalue() == ""
    line = r"\d{4}-\d\d-\d\d \S+ info ftruntime\.engine\.loop: decode steps=20 seqs=3\n"
    assert re.fullmatch(line, second.getvalue())


@pytest.mark.parametrize("level", log.LEVELS)
def test_a_child_gets_the_level_of_its_parent(level: str) -> None:
    log.setup(level, io.StringIO())
    assert log.level_name() == level


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ValueError, match="log level is 'loud', expected one of debug, info"):
        log.setup("loud")
