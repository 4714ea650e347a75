"""A tensor-parallel rank other than 0."""

from __future__ import annotations

import logging
import time
from typing import Final

from ftruntime.config import RuntimeConfig
from ftruntime.engine.build import build_rank
from ftruntime.engine.executor import DeviceExecutor
from ftruntime.engine.meeting import Meeting
from ftruntime.engine.tp import TensorParallel
from ftruntime.facts import probe
from ftruntime.types import EngineFailedError, StepPlan

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
        elif message != "alive":
            return
