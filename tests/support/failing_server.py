"""`ftruntime serve` with an engine that can be told to fail or to stall by a prompt.

    python -m tests.support.failing_server MODEL --port N ...

A step that prefills `FAIL_IDS` raises; one that prefills `STALL_IDS` takes `STALL_S` seconds; one
that decodes a request whose prompt ended with `FAIL_LATER_IDS` raises. Production code has no such
hook: the front takes any builder by name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ftruntime import log
from ftruntime.config import RuntimeConfig
from ftruntime.engine.build import build_engine
from ftruntime.engine.loop import EngineLoop
from ftruntime.engine.process import Progress
from ftruntime.server.bridge import Bridge
from ftruntime.server.serve import run_server
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer
from ftruntime.types import Executor, StepPlan, StepResult

FAIL_IDS = (300, 301, 302)
FAIL_LATER_IDS = (300, 301, 303)
STALL_IDS = (300, 301, 304)
STALL_S = 3.0


class FailingExecutor:
    """Passes plans on, unless a prompt asks for trouble."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._doomed: set[str] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        for seq in plan.seqs:
            ending = seq.token_ids[-3:]
            if ending == FAIL_IDS:
                raise ZeroDivisionError("a test asked for it")
            if ending == STALL_IDS:
                time.sleep(STALL_S)
            if plan.kind == "decode" and seq.request_id in self._doomed:
                self._doomed.discard(seq.request_id)
                raise ZeroDivisionError("a test asked for it later")
            if ending == FAIL_LATER_IDS:
                self._doomed.add(seq.request_id)
        return self._inner.execute(plan)


def build(
    config: Mapping[str, object], progress: Progress, on_end: Callable[[str], None]
) -> EngineLoop:
    loop = build_engine(RuntimeConfig.from_dict(config), progress)
    loop._executor = FailingExecutor(loop._executor)
    return loop


def main(model: str, *flags: str) -> int:
    names = [name.removeprefix("--").replace("-", "_") for name in flags[::2]]
    values = [int(value) if value.isdigit() else value for value in flags[1::2]]
    config = RuntimeConfig.from_flags(model=model, **dict(zip(names, values, strict=True)))
    log.setup()
    client = Bridge(
        config.to_dict(), builder="tests.support.failing_server:build",
        stall_timeout_s=config.stall_timeout_s,
    )  # fmt: skip
    path = Path(model)
    return run_server(config, client, Tokenizer.from_dir(path), ChatFormat.from_dir(path))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
