"""Compile an op's kernels for a card this machine does not have, and read off what they use."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import Any

from ftkernels import backend
from ftkernels.config import pin
from ftkernels.spec import Case, KernelSpec
from ftkernels.testing import aot

Row = dict[str, Any]


def compile_for(
    spec: KernelSpec, case: Case, *, arch: int = 89, config: object = None
) -> list[Row]:
    """Compile every launch of one case; nothing is executed.

    Args:
        spec: the op; its inputs are built on meta.
        case: one of `spec.cases`, or other sizes.
        arch: compute capability times ten.
        config: a config record instead of the one the lookup gives.

    Returns:
        One dict per launch, in order: `kernel`, `registers`, `spill_bytes` (from `ptxas -v`),
        `shared_bytes`, `fits`, `warps_per_sm`, `grid`, `sass` (opcode -> count).

    Raises:
        RuntimeError: `TRITON_INTERPRET` is on; offline compiles need another process.
    """
    if backend.interpreted():
        raise RuntimeError("compile_for: TRITON_INTERPRET is on, expected a process without it")
    pinned = pin(spec.name, config) if config is not None else contextlib.nullcontext()
    with pinned, aot.capture_launches(arch=arch) as got:
        args, kwargs = spec.inputs(case, device="meta", seed=0)
        spec.op(*args, **kwargs)
    return [_row(launch, arch) for launch in got.launches]


def _row(launch: aot.Launch, arch: int) -> Row:
    report = launch.report
    return {
        "kernel": launch.name,
        "registers": report.regs,
        "spill_bytes": _spill_bytes(report.ptx, arch),
        "shared_bytes": report.shared,
        "fits": report.fits,
        "warps_per_sm": report.blocks_per_sm * report.num_warps,
        "grid": launch.grid,
        "sass": dict(Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)",
                                        report.sass, re.M))),
    }  # fmt: skip


def _spill_bytes(ptx: str, arch: int) -> int:
    text = aot.ptxas_v(ptx, arch)
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text))

