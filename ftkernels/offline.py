"""Compile an op's kernels for a card this machine does not have, and read off what they use."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ftkernels import backend
from ftkernels.config import Found, pin, watch
from ftkernels.spec import Case, KernelSpec
from ftkernels.testing import aot, sass

Row = dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """One launch of an op, and the lookup its config came from (None: the launch looks up none)."""

    launch: aot.Launch
    found: Found | None


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
        `shared_bytes`, `fits`, `warps_per_sm`, `grid`, `sass` (opcode -> count in the hot loop).

    Raises:
        RuntimeError: `TRITON_INTERPRET` is on; offline compiles need another process.
        ValueError: no facts are known for `arch`.
    """
    launches = [x.launch for x in compile_launches(spec, case, arch=arch, config=config)]
    return [_row(launch) for launch in launches]


def compile_launches(
    spec: KernelSpec, case: Case, *, arch: int = 89, config: object = None
) -> list[Compiled]:
    """As `compile_for`, before anything is read off: machine code is printed on demand only."""
    if backend.interpreted():
        raise RuntimeError("compile_for: TRITON_INTERPRET is on, expected a process without it")
    found: list[tuple[int, Found]] = []  # number of launches before the lookup
    pinned = contextlib.nullcontext() if config is None else pin(spec.name, config)
    with (
        pinned, aot.capture_launches(arch=arch) as got,
        watch(lambda lookup: found.append((len(got.launches), lookup))),
    ):  # fmt: skip
        args, kwargs = spec.inputs(case, device="meta", seed=0)
        spec.op(*args, **kwargs)
    compiled = []
    for index, launch in enumerate(got.launches):
        before = [lookup for launches, lookup in found if launches <= index]
        compiled.append(Compiled(launch, before[-1] if before else None))
    return compiled


def _row(launch: aot.Launch) -> Row:
    report = launch.report
    return {
        "kernel": launch.name,
        "registers": report.regs,
        "spill_bytes": report.spill_bytes,
        "shared_bytes": report.shared,
        "fits": report.fits,
        "warps_per_sm": report.blocks_per_sm * report.num_warps,
        "grid": launch.grid,
        "sass": dict(sass.hot_loop(report.sass)),
    }
