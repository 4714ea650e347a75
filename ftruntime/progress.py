"""Progress of a start-up: a bar on a terminal, a log line every tenth elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, TaskID

_logger = logging.getLogger(__name__)
_STEP = 0.1


class StartProgress:
    """Called with a phase and its share done, in [0, 1]; every phase has a bar of its own.

    What stands behind a colon tells more of the same phase: "load weights: 3.2 of 6.0 GiB".
    """

    def __init__(self, *, terminal: bool | None = None) -> None:
        shown = sys.stderr.isatty() if terminal is None else terminal
        self._bars = Progress(console=Console(stderr=True)) if shown else None
        self._tasks: dict[str, TaskID] = {}
        self._logged: dict[str, float] = {}

    def __call__(self, phase: str, share: float) -> None:
        if self._bars is None:
            self._log(phase, share)
            return
        name = phase_name(phase)
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(phase, total=1.0)
        self._bars.update(self._tasks[name], description=phase, completed=share)

    def _log(self, phase: str, share: float) -> None:
        last = self._logged.get(phase_name(phase))
        if last is not None and share - last < _STEP and not (share == 1.0 and last < 1.0):
            return
        self._logged[phase_name(phase)] = share
        _logger.info("starting phase=%r progress=%.0f%%", phase, 100 * share)

    def __enter__(self) -> StartProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


def phase_name(phase: str) -> str:
    """A phase without what tells more of it."""
    return phase.partition(":")[0]
