"""Lanes: plain (reference), TRITON_INTERPRET=1 (interpreted), and a card when there is one."""

from __future__ import annotations

import logging
import os
import sys

# one thread, before torch or triton is imported: two threads on a busy small machine are far slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# a runner of tests may say 80 columns; commands under test print into pipes
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = not INTERPRETED and torch.cuda.is_available()


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def lane() -> str:
    return "gpu" if HAS_GPU else "interpreter" if INTERPRETED else "reference"


@pytest.fixture
def run(lane: str) -> Callable[..., Any]:
    """Calls an op and asserts that its kernel was launched, except in the reference lane."""
    from ftkernels.testing import count_launches

    def call(op: Callable[..., Any], *args: Any, launched: bool = True, **kwargs: Any) -> Any:
        with count_launches() as launches:
            result = op(*args, **kwargs)
        expected = launched and lane != "reference"
        assert bool(launches) == expected, f"{op.__name__} launched {launches} in the {lane} lane"
        return result

    return call


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On a card a failure is told when it happens."""
    if HAS_GPU and report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(report.longrepr)
        if crash is not None:
            reason = f"{crash.path}:{crash.lineno}: {crash.message}"
        print(f"\n{report.nodeid}: {reason[:600]}", file=sys.stderr, flush=True)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """What a command under test sets up for logging ends with its test."""
    loggers = [logging.getLogger(name) for name in ("ftruntime", "ftkernels")]
    before = [(x.handlers[:], x.level, x.propagate) for x in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(autouse=True)
def _poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Outputs start as NaN in every kernel test."""
    if "ftkernels" not in request.path.parts:
        yield
        return
    from ftkernels.testing import nan_poison

    with nan_poison():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which lane ran, and on which card."""
    name = "interpreter" if INTERPRETED else "reference"
    if HAS_GPU:
        major, minor = torch.cuda.get_device_capability()
        name = f"gpu, {torch.cuda.get_device_name()}, capability {major}.{minor}"
    terminalreporter.write_line(f"kernels ran in lane: {name}")
