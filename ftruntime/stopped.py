"""Processes that a signal has stopped: they neither end nor go on."""

from __future__ import annotations

import time
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds the process stopped; False for one that is gone."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


class StoppedFor:
    """How long a process has been stopped, as seen by whoever asks again and again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since_s: float | None = None

    def seconds(self) -> float:
        """Since it was first seen stopped; 0 while it runs."""
        if not is_stopped(self._pid):
            self._since_s = None
        elif self._since_s is None:
            self._since_s = time.monotonic()
        return 0.0 if self._since_s is None else time.monotonic() - self._since_s
