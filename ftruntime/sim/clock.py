"""Time that passes only when a step says so."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the experiment began; may start below zero, for what came before it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """A step took this long."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}, expected >= 0")
        self._now_s += seconds

    def wait_until(self, time_s: float) -> None:
        """Nothing happens before `time_s`; without effect when that is over."""
        self._now_s = max(self._now_s, time_s)
