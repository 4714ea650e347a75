"""A tensor-parallel rank other than 0: `python -m ftruntime.engine.worker`, started by rank 0.

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
import time
from typing import Final

from ftruntime import log
from ftruntime.config import RuntimeConfig
from ftruntime.engine.build import build_rank
from ftruntime.engine.executor import DeviceExecutor
from ftruntime.engine.meeting import Meeting
from ftruntime.engine.tp import TensorParallel
from ftruntime.facts import probe
from ftruntime.types import EngineFailedError, StepPlan

_PR_SET_PDEATHSIG: Final = 1
_GRACE_S: Final = 5.0

_logger = logging.getLogger(__name__)


def run_rank(config: RuntimeConfig, meeting: Meeting, device: str) -> int:
    """Meet rank 0 and execute its plans until it says the end; the exit status."""
    try:
        parallel = TensorParallel(meeting, device=device, timeout_s=config.stall_timeout_s)
        facts = probe(config.device)
        executor = build_rank(config, facts, parallel, lambda phase, share: None).executor
        try:
            _execute(executor, parallel)
        finally:
            executor.close()
            parallel.close()
    except EngineFailedError as error:
        _logger.error("rank ends: %s", error)
        time.sleep(_GRACE_S)  # rank 0 says what happened, and ends this process with it
        return 1
    except (ValueError, OSError, MemoryError) as error:
        _logger.error("rank %d of %d ends: %s", meeting.rank, meeting.size, error)
        return 1
    return 0


def _execute(executor: DeviceExecutor, parallel: TensorParallel) -> None:
    while True:
        message = parallel.hear()
        if isinstance(message, StepPlan):
            executor.execute(message)
        elif message == "begin":
            executor.begin()
        else:
            return


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
    config = RuntimeConfig.from_dict(start["config"])
    log.setup(start["log_level"])
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    rank, size = start["rank"], start["size"]
    meeting = Meeting(rank, size, "127.0.0.1", start["port"], rank, size)
    return run_rank(config, meeting, start["device"])


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)
