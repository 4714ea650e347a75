"""The process of a rank other than 0: `python -m ftruntime.engine.rank_process`, started by rank 0.

The first line of stdin says what to run; its end means that rank 0 is gone, and so ends this one.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
from typing import Final

from ftruntime import log
from ftruntime.config import RuntimeConfig
from ftruntime.engine.meeting import Meeting

_PR_SET_PDEATHSIG: Final = 1


def _die_with_parent() -> None:
    """Killed by the kernel when rank 0 ends, even while this process is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> int:
    """Entry point; an interrupt at the terminal is the front's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = json.loads(sys.stdin.buffer.readline())
    if start["dies_with_parent"]:
        _die_with_parent()
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # seconds of imports, in which rank 0 may end
    from ftruntime.engine.worker import run_rank

    config = RuntimeConfig.from_dict(start["config"])
    log.setup(start["log_level"])
    rank, size = start["rank"], start["size"]
    meeting = Meeting(rank, size, "127.0.0.1", start["port"], rank, size)
    return run_rank(config, meeting, start["device"])


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)
