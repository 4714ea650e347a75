"""Processes of ranks that end before they have read what they are to do.

Mutants run, each noticed: the broken pipe let through when it is written to, or when it is closed.
"""

from __future__ import annotations

import queue
import sys

import pytest

from ftruntime.config import RuntimeConfig
from ftruntime.engine import ranks
from ftruntime.engine.ranks import RankProcesses


class _EndsAtOnce:
    """Stands for `subprocess`: every process ends without having read anything."""

    PIPE = ranks.subprocess.PIPE
    TimeoutExpired = ranks.subprocess.TimeoutExpired

    @staticmethod
    def Popen(command, **kwargs):
        process = _POPEN([sys.executable, "-c", "raise SystemExit(3)"], **kwargs)
        process.wait(30)
        return process


_POPEN = ranks.subprocess.Popen


def test_a_rank_that_ends_at_once_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "subprocess", _EndsAtOnce)
    told: queue.Queue[str] = queue.Queue()
    processes = RankProcesses(RuntimeConfig.from_flags(tp=2), 1, "cpu")
    processes.watch(told.put)
    assert told.get(timeout=10) == "rank 1 of 2 ended with status 3"
    assert processes.ended(0) == "rank 1 of 2 ended with status 3"
    processes.close()
